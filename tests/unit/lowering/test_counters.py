"""int64 buffers of the user's own that grow beyond 32 bits during a run."""

import pytest
import torch
from torch.nn import functional as F

import jaxtrain
from jaxtrain import Trainer, TrainingConfig

NEAR = 2**31 - 100
X, Y = torch.randn(32, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(32, 1)


class Counts(torch.nn.Module):
    def __init__(self, start=NEAR):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.register_buffer("tokens", torch.tensor(start))
        self.register_buffer("seen", torch.tensor([start, 1]))
        self.register_buffer("data", torch.tensor(start))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.tokens += 10 * x.numel()
            self.seen[0] += 50
            self.data += (x.abs() * 1e3).long().sum()
            self.calls += 1
        return self.layer(x) + (self.tokens > 2**31) * x.mean()


def in_torch(start=NEAR):
    torch.manual_seed(0)
    module = Counts(start)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for x, y in zip(X.split(8), Y.split(8), strict=True):
        optimizer.zero_grad()
        F.mse_loss(module(x), y).backward()
        optimizer.step()
    return module


def assert_same(module, wanted):
    for (name, value), other in zip(module.state_dict().items(), wanted.state_dict().values(), strict=True):
        torch.testing.assert_close(value, other, atol=1e-5, rtol=1e-5, msg=name)
    assert [module.tokens.item(), *module.seen.tolist()] == [wanted.tokens.item(), *wanted.seen.tolist()]


@pytest.mark.parametrize("start", [NEAR, 2**40])
def test_a_counter_of_a_users_loop_grows_beyond_32_bits(start):
    torch.manual_seed(0)
    module = Counts(start)
    step = jaxtrain.compile(module, lambda m, b: F.mse_loss(m(b[0]), b[1]), torch.optim.SGD(module.parameters(), 0.1))
    for batch in zip(X.split(8), Y.split(8), strict=True):
        step(batch)
    step.sync()
    assert_same(module, in_torch(start))


def test_a_counter_of_a_run_grows_beyond_32_bits_over_a_checkpoint(tmp_path):
    def trained(steps):
        torch.manual_seed(0)
        module = Counts()
        config = TrainingConfig(
            run={"dir": str(tmp_path), "quiet": True},
            data={"batch_size": 8, "shuffle": False},
            train={"steps": steps},
            optim={"clip_norm": None},
        )
        data = torch.utils.data.TensorDataset(X, Y)
        Trainer(
            module, data, None, config, loss=F.mse_loss, optimizer=torch.optim.SGD(module.parameters(), 0.1)
        ).train()
        return module

    assert trained(3).tokens > 2**31
    assert_same(trained(4), in_torch())
