"""A run begins from what the torch objects hold then, and writes back all that torch's loop would have changed."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from jaxtrain import Trainer, UserError
from tests.e2e.trainings import X, Y, assert_torchs, config, mlp, train_in_torch

DATA = TensorDataset(X, Y)


def trainer_of(module, folder, optimizer=None) -> Trainer:
    settings = config(folder) if optimizer is None else config(folder, optim={"clip_norm": None})
    return Trainer(module, DATA, DATA, settings, loss=nn.MSELoss(), optimizer=optimizer)


def halve_in_place(module):
    module.load_state_dict({key: value / 2 for key, value in module.state_dict().items()})


def halve_unseen(module):
    for parameter in module.parameters():
        parameter.data.numpy()[...] /= 2  # counts no version up


@pytest.mark.parametrize("change", [halve_in_place, halve_unseen])
def test_weights_loaded_after_construction_are_trained(change, tmp_path):
    ours = mlp()
    trainer = trainer_of(ours, tmp_path)
    change(ours)
    theirs = copy.deepcopy(ours)
    trainer.train()
    train_in_torch(theirs, DATA, lambda module, batch: mse_loss(module(batch[0]), batch[1]))
    assert_torchs(theirs, ours)


def test_an_evaluation_is_of_the_modules_present_weights(tmp_path):
    module = mlp()
    trainer = trainer_of(module, tmp_path)
    halve_in_place(module)
    assert trainer.evaluate()["loss"] == pytest.approx(mse_loss(module(X), Y).item(), rel=1e-5)


def test_weights_changed_after_steps_count_in_the_next_evaluation(tmp_path):
    ours = mlp()
    trainer = trainer_of(ours, tmp_path)
    trainer.train()
    halve_in_place(ours)
    assert trainer.evaluate()["loss"] == pytest.approx(mse_loss(ours(X), Y).item(), rel=1e-5)


def test_tensors_that_took_others_places_are_refused(tmp_path):
    module = mlp()
    trainer = trainer_of(module, tmp_path)
    module.load_state_dict({key: value.clone() for key, value in module.state_dict().items()}, assign=True)
    with pytest.raises(UserError, match="0.weight is another tensor in the torch module than when"):
        trainer.train()


def test_a_state_loaded_into_the_torch_optimizer_counts(tmp_path):
    def made():
        torch.manual_seed(0)
        module = mlp()
        return module, torch.optim.SGD(module.parameters(), 1e-2, momentum=0.9)

    def fit(module, optimizer):
        for x, y in zip(X.split(8), Y.split(8), strict=True):
            optimizer.zero_grad()
            mse_loss(module(x), y).backward()
            optimizer.step()

    before, optimizer = made()
    fit(before, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    (whole, own), (split, other) = made(), made()
    trainer = trainer_of(split, tmp_path, other)
    own.load_state_dict(copy.deepcopy(saved))
    other.load_state_dict(saved)
    trainer.train()
    for step in range(trainer.total_steps):
        batch = trainer.train_loader.host_batch(step)
        own.zero_grad()
        mse_loss(whole(torch.tensor(batch["0"])), torch.tensor(batch["1"])).backward()
        own.step()
    assert_torchs(whole, split)


class RunningMean(nn.Module):
    """Writes a buffer outside the state dict."""

    def __init__(self, assign: bool):
        super().__init__()
        self.net, self.assign = mlp(), assign
        self.register_buffer("mean", torch.zeros(X.shape[1]), persistent=False)

    def forward(self, x):
        if self.training:
            mean = (0.9 * self.mean + 0.1 * x.mean(0)).detach()
            if self.assign:
                self.mean = mean
            else:
                self.mean.copy_(mean)
        return self.net(x - self.mean)


@pytest.mark.parametrize("assign", [True, False])
def test_buffers_outside_the_state_dict_are_written_back(assign, tmp_path):
    ours = RunningMean(assign)
    theirs = copy.deepcopy(ours)
    trainer_of(ours, tmp_path).train()
    train_in_torch(theirs, DATA, lambda module, batch: mse_loss(module(batch[0]), batch[1]))
    torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("assign", [True, False])
def test_such_a_buffer_begins_as_it_is_before_training(assign, tmp_path):
    ours = RunningMean(assign)
    trainer = trainer_of(ours, tmp_path)
    ours.train()(X + 1)
    theirs = copy.deepcopy(ours)
    trainer.train()
    train_in_torch(theirs, DATA, lambda module, batch: mse_loss(module(batch[0]), batch[1]))
    torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-5, atol=1e-6)


def test_a_constant_that_was_changed_is_refused(tmp_path):
    module = RunningMean(assign=False)
    module.register_buffer("scale", torch.ones(6), persistent=False)
    module.register_forward_pre_hook(lambda module, inputs: (inputs[0] * module.scale,))
    trainer = trainer_of(module, tmp_path)
    module.scale.mul_(2)
    with pytest.raises(UserError, match=r"scale was changed after Trainer\(...\) was made, .* as a constant"):
        trainer.train()
