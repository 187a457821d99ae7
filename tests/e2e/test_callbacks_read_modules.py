"""Callbacks find the present weights and moments in the torch objects that the Trainer was given."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from jaxtrain import Trainer, TrainingConfig, UserError

pytestmark = pytest.mark.slow

X = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


def objects():
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    return module, torch.optim.Adam(module.parameters(), 1e-2)


class Reads:
    """Calls `read(module, optimizer)` after every step."""

    def __init__(self, read, module, optimizer):
        self.read, self.module, self.optimizer, self.seen = read, module, optimizer, []

    def on_step_end(self, trainer, step, metrics):
        value = self.read(self.module, self.optimizer)
        self.seen.append(None if value is None else value.detach().clone())


def train(folder, read, kind=Reads, **settings):
    module, optimizer = objects()
    callback = kind(read, module, optimizer)
    config = TrainingConfig(
        run={"dir": str(folder), "quiet": True},
        data={"batch_size": 8, "shuffle": False},
        train={"steps": 8},
        **settings,
    )
    data = torch.utils.data.TensorDataset(X, Y)
    Trainer(module, data, None, config, loss=F.mse_loss, optimizer=optimizer, callbacks=[callback]).train()
    return callback


def in_torch(read):
    (module, optimizer), seen = objects(), []
    for x, y in zip(X.split(8), Y.split(8), strict=True):
        optimizer.zero_grad()
        F.mse_loss(module(x), y).backward()
        optimizer.step()
        seen.append(read(module, optimizer).detach().clone())
    return seen


READS = {
    "state dict": lambda module, optimizer: module.state_dict()["0.weight"],
    "buffer": lambda module, optimizer: module[1].running_mean,
    "forward": lambda module, optimizer: copy.deepcopy(module).eval()(X[:4]),
    "moments": lambda module, optimizer: optimizer.state_dict()["state"][0]["exp_avg"],
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_callback_reads_the_weights_of_its_step(tmp_path, read):
    callback = train(tmp_path, read)
    torch.testing.assert_close(callback.seen, in_torch(read), atol=1e-5, rtol=1e-4)
    assert type(callback.module[0].weight) is nn.Parameter


def test_averaged_weights_are_what_is_read_where_there_are(tmp_path):
    read = READS["state dict"]
    callback = train(tmp_path, read, optim={"ema_decay": 0.5})
    torch.testing.assert_close(callback.seen[-1], callback.module[0].weight.detach())
    assert not torch.equal(callback.seen[-1], in_torch(read)[-1])


def test_a_callback_that_changes_weights_is_refused(tmp_path):
    def clip(module, optimizer):
        module[0].weight.data.clamp_(-0.1, 0.1)

    with pytest.raises(UserError, match=r"callback Reads.on_step_end changed 0.weight in the torch module"):
        train(tmp_path, clip)


class WritesBack(Reads):
    """Reads the module, has the trainer write the weights into it, and reads again."""

    def on_step_end(self, trainer, step, metrics):
        for _ in range(2):
            super().on_step_end(trainer, step, metrics)
            trainer.write_back()


def test_what_the_trainer_writes_back_in_a_callback_is_no_change(tmp_path):
    seen = train(tmp_path, lambda module, optimizer: module[0].weight, kind=WritesBack).seen
    assert all(torch.equal(first, second) for first, second in zip(seen[::2], seen[1::2], strict=True))
    assert len(seen) == 16


def test_a_change_that_is_written_over_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"changed 0.weight in the torch module"):
        train(tmp_path, lambda module, optimizer: module[0].weight.data.zero_(), kind=WritesBack)


def test_a_run_whose_callbacks_read_nothing_writes_once(tmp_path, monkeypatch):
    written = []
    write_back = Trainer.write_back
    monkeypatch.setattr(Trainer, "write_back", lambda self: (written.append(1), write_back(self)))
    train(tmp_path, lambda module, optimizer: None)
    assert len(written) == 1
