"""Losses and modules that keep something in Python between steps: torch runs them, around the compiled modules."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import jaxtrain
from jaxtrain import Trainer, TrainingConfig, UserError
from tests.e2e.loops import assert_same, batches, mse, net, sgd, torch_step

pytestmark = pytest.mark.slow


class Counts:
    """A loss that counts its calls, keeps its values and draws from Python's generator."""

    def __init__(self):
        self.calls, self.seen, self.last = 0, [], None

    def __call__(self, module, batch):
        self.calls += 1
        loss = mse(module, batch)
        self.seen.append(loss.item())
        self.last = loss.detach()
        return loss * min(1.0, self.calls / 4) * (2 if random.random() < 0.5 else 1)


class Remembers(nn.Module):
    """A recurrent cell whose state outlives the call."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.cell, self.head, self.state, self.calls = nn.GRUCell(6, 8), nn.Linear(8, 1), None, 0

    def forward(self, x):
        self.calls += 1
        self.state = self.cell(x, self.state).detach() if self.calls % 5 == 0 else self.cell(x, self.state)
        out = self.head(self.state)
        self.state = self.state.detach()
        return out


def kept(loss, module):
    found = [*getattr(loss, "seen", []), getattr(loss, "calls", 0), getattr(module, "calls", 0)]
    return found + [x.sum() for x in (getattr(loss, "last", None), getattr(module, "state", None)) if x is not None]


@pytest.mark.parametrize(("make", "loss"), [(net, Counts), (Remembers, lambda: mse)], ids=["loss", "module"])
def test_what_a_loop_keeps_in_python_is_torchs(make, loss, caplog):
    found = {}
    for engine in ("torch", "jaxtrain"):
        random.seed(3)
        module, loss_fn = make(), loss()
        optimizer = sgd(module)
        step = torch_step(module, optimizer, loss_fn)
        if engine == "jaxtrain":
            step = jaxtrain.compile(module, loss_fn, optimizer)
        losses = [float(step(batch)) for batch in batches()]
        found[engine] = module, [*losses, *map(float, kept(loss_fn, module))]
        if engine == "jaxtrain":
            step.sync()
            assert step.count == len(losses)
    assert found["jaxtrain"][1] == pytest.approx(found["torch"][1], rel=1e-4)
    assert_same(found["torch"][0], found["jaxtrain"][0])
    assert caplog.text.count("the loss and updates in torch") == 1


class Late:
    """A loss that is another in the second half of a run, by a number that changes at every call."""

    def __init__(self, is_late):
        self.epoch, self.is_late = 0.0, is_late

    def __call__(self, module, batch):
        return mse(module, batch) * (2 if self.is_late(self.epoch) else 1)


def late_run(is_late):
    """Compare forty steps with torch's; return the compiled step."""
    found = []
    for compiled in (False, True):
        module, loss, losses = net(), Late(is_late), []
        optimizer = sgd(module)
        step = jaxtrain.compile(module, loss, optimizer) if compiled else torch_step(module, optimizer, loss)
        for number, batch in enumerate(batches(40)):
            loss.epoch = number / 25
            losses.append(float(step(batch)))
        found.append((module, losses))
    step.sync()
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-4)
    assert_same(found[0][0], found[1][0])
    return step


def test_a_branch_on_a_number_that_always_changes_has_a_program_per_way():
    step = late_run(lambda epoch: epoch > 0.8)
    assert step.torch is None
    assert len(step.programs) <= 3  # the first value's, and one per way; those that compute alike share one


def test_a_text_of_a_number_that_always_changes_is_not_recorded_for_ever(caplog):
    step = late_run(lambda epoch: str(epoch) > "0.8")
    assert step.torch is not None
    assert "Python branches on .epoch, which changes from call to call" in caplog.text


def test_gradients_that_wait_for_an_update_go_on_in_torch():
    losses = {}
    for engine in ("torch", "jaxtrain"):
        module = net()
        optimizer = sgd(module)
        settings = {"kept": None}

        def loss(module, batch, settings=settings):
            value = mse(module, batch)
            if len(batch[0]) == 4:
                settings["kept"] = value.detach()
            return value

        step = None if engine == "torch" else jaxtrain.compile(module, loss, optimizer, clip_norm=0.5)
        for number, batch in enumerate([*batches(5), *batches(4, rows=4)]):
            updating = number % 3 == 2
            if step is not None:
                step(batch, update=updating)
                continue
            loss(module, batch).backward()
            if updating:
                nn.utils.clip_grad_norm_(module.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        if step is not None:
            step.sync()
        losses[engine] = module, float(settings["kept"])
    assert losses["jaxtrain"][1] == pytest.approx(losses["torch"][1], rel=1e-4)
    assert_same(losses["torch"][0], losses["jaxtrain"][0])


def test_a_tensor_that_the_loop_binds_anew_counts():
    found = []
    for compiled in (False, True):
        module, settings = net(), {"target": torch.ones(1)}
        optimizer = sgd(module)
        loss = lambda module, batch, settings=settings: F.mse_loss(module(batch[0]), batch[1] * settings["target"])
        step = jaxtrain.compile(module, loss, optimizer) if compiled else torch_step(module, optimizer, loss)
        found.append([])
        for number, batch in enumerate(batches()):
            found[-1].append(float(step(batch)))
            settings["target"] = torch.full((1,), float(number))
    assert found[1] == pytest.approx(found[0], rel=1e-4)


class Weights:
    """A callback that changes a constant of the loss after the first epoch."""

    def __init__(self, change):
        self.change = change

    def on_epoch_end(self, trainer, epoch):
        self.change()


def _trainer(folder, loss, callback):
    config = TrainingConfig(
        run={"dir": str(folder), "quiet": True},
        data={"batch_size": 8},
        train={"epochs": 2},
        evaluation={"every_epochs": None},
        tracking={"tensorboard": False},
        shard={"devices": 1},
    )
    data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 3))
    return Trainer(torch.nn.Linear(4, 3), data, None, config, loss=loss, callbacks=[callback])


@pytest.mark.parametrize("write", ["in place", "numpy", "anew"])
def test_a_callback_that_changes_a_tensor_of_the_loss_is_refused(tmp_path, write):
    settings = {"weights": torch.ones(3)}
    changes = {
        "in place": lambda: settings["weights"].mul_(2),
        "numpy": lambda: settings["weights"].numpy().fill(2),
        "anew": lambda: settings.update(weights=torch.full((3,), 2.0)),
    }
    loss = lambda output, batch: ((output - batch[1]) ** 2 * settings["weights"]).mean()
    with pytest.raises(UserError, match=r"changed .*weights.*keeps the value of the start"):
        _trainer(tmp_path, loss, Weights(changes[write])).train()


def test_an_array_that_the_loss_does_not_read_may_change(tmp_path):
    settings = {"weights": torch.ones(3), "seen": np.zeros(2)}
    loss = lambda output, batch: ((output - batch[1]) ** 2 * settings["weights"]).mean()
    history = _trainer(tmp_path, loss, Weights(lambda: settings["seen"].__iadd__(1))).train()
    assert len(history["train_history"]) == 2
