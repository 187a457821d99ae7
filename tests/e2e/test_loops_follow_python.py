"""A loss reads from Python what torch's would read at that call, and changes it as often."""

import enum
import itertools
import logging
import os
import random
import types
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import jaxtrain
from jaxtrain import UserError
from tests.e2e.loops import batches, mse, net, torch_step


class Mode(enum.Enum):
    FAR, NEAR = 1, 2


class Ramp:
    def __init__(self):
        self.t = 0

    def __call__(self):
        return 1 / (1 + self.t)


@dataclass(slots=True)
class Slotted:
    weight: float = 1.0


def absolute(module, batch):
    return F.l1_loss(module(batch[0]), batch[1])


def held_apart(t, module):
    return sum((parameter - other).pow(2).sum() for parameter, other in zip(module.parameters(), t.held, strict=False))


def grow(t, step):
    if step == 1:
        t.terms.append(absolute)


FOLLOWED = {  # what the user keeps; the loss; what the user does after a step
    "another criterion": (
        lambda: types.SimpleNamespace(criterion=nn.MSELoss()),
        lambda t, m, b: t.criterion(m(b[0]), b[1]),
        lambda t, step: setattr(t, "criterion", nn.HuberLoss(delta=0.1 + step // 3)),
    ),
    "other settings": (
        lambda: types.SimpleNamespace(config=types.SimpleNamespace(weight=1.0)),
        lambda t, m, b: t.config.weight * mse(m, b),
        lambda t, step: setattr(t, "config", types.SimpleNamespace(weight=1.0 + step)),
    ),
    "another list of weights": (
        lambda: types.SimpleNamespace(weights=[1.0, 1.0]),
        lambda t, m, b: t.weights[0] * mse(m, b) + t.weights[1] * absolute(m, b),
        lambda t, step: setattr(t, "weights", [1.0 + step, 0.5]),
    ),
    "a list of losses that grows": (
        lambda: types.SimpleNamespace(terms=[mse]),
        lambda t, m, b: sum(term(m, b) for term in t.terms),
        grow,
    ),
    "a key that appears": (
        lambda: types.SimpleNamespace(weights={}),
        lambda t, m, b: mse(m, b) + t.weights.get("absolute", 0.0) * absolute(m, b),
        lambda t, step: t.weights.update(absolute=1.0) if step == 1 else None,
    ),
    "a set": (
        lambda: types.SimpleNamespace(on=set()),
        lambda t, m, b: mse(m, b) + ("absolute" in t.on) * absolute(m, b),
        lambda t, step: t.on.add("absolute") if step == 1 else None,
    ),
    "a dict of tensors": (
        lambda: types.SimpleNamespace(held={}),
        lambda t, m, b: mse(m, b) + sum((m[0].weight * f).sum() for f in t.held.values()),
        lambda t, step: setattr(t, "held", {0: torch.full((8, 6), 0.1)}) if step == 1 else None,
    ),
    "tensors in place of None": (
        lambda: types.SimpleNamespace(held=None),
        lambda t, m, b: mse(m, b) + (0 if t.held is None else held_apart(t, m)),
        lambda t, step: setattr(t, "held", (torch.ones(8, 6), torch.ones(8))) if step == 2 else None,
    ),
    "a name that is a text": (
        lambda: types.SimpleNamespace(weight=0.0),
        lambda t, m, b: mse(m, b) + getattr(t, "weight", 0.0) * absolute(m, b),
        lambda t, step: setattr(t, "weight", 1.0 + step),
    ),
    "an attribute that appears": (
        lambda: types.SimpleNamespace(),
        lambda t, m, b: mse(m, b) * getattr(t, "scale", 1.0),
        lambda t, step: setattr(t, "scale", 2.0) if step == 1 else None,
    ),
    "an enum": (
        lambda: types.SimpleNamespace(mode=Mode.FAR),
        lambda t, m, b: mse(m, b) if t.mode is Mode.FAR else absolute(m, b),
        lambda t, step: setattr(t, "mode", Mode.NEAR if step % 2 else Mode.FAR),
    ),
    "a number of numpy's": (
        lambda: types.SimpleNamespace(weight=np.float32(1)),
        lambda t, m, b: float(t.weight) * mse(m, b),
        lambda t, step: setattr(t, "weight", np.float32(1 + step // 3)),
    ),
    "an object that is called": (
        lambda: types.SimpleNamespace(ramp=Ramp()),
        lambda t, m, b: t.ramp() * mse(m, b),
        lambda t, step: setattr(t.ramp, "t", step + 1),
    ),
    "slots": (
        lambda: types.SimpleNamespace(config=Slotted()),
        lambda t, m, b: t.config.weight * mse(m, b),
        lambda t, step: setattr(t.config, "weight", 2.0 + step),
    ),
    "an item of a long list": (
        lambda: types.SimpleNamespace(weights=[1.0] * 100),
        lambda t, m, b: t.weights[3] * mse(m, b),
        lambda t, step: t.weights.__setitem__(3, 1.0 + step // 3),
    ),
    "a number that is read only later": (
        lambda: types.SimpleNamespace(epoch=0, weight=0.0),
        lambda t, m, b: mse(m, b) + (t.weight * absolute(m, b) if t.epoch >= 2 else 0.0),
        lambda t, step: vars(t).update(epoch=step // 2, weight=0.1 * step),
    ),
    "the mode of a module of elsewhere": (
        lambda: types.SimpleNamespace(teacher=nn.Dropout(1.0)),
        lambda t, m, b: mse(m, b) + t.teacher(b[1]).sum() * m(b[0]).mean(),
        lambda t, step: t.teacher.eval() if step == 2 else None,
    ),
}  # fmt: skip


def both(make, loss_of, after, steps=8):
    """The losses of torch's loop and of the compiled one, what each has kept, and the compiled step."""
    found = []
    for ours in (False, True):
        module, kept = net(), make()
        optimizer = torch.optim.SGD(module.parameters(), 0.05)
        loss = lambda m, b, kept=kept: loss_of(kept, m, b)
        step = jaxtrain.compile(module, loss, optimizer) if ours else torch_step(module, optimizer, loss)
        losses = []
        for number, batch in enumerate(batches(steps)):
            losses.append(float(step(batch)))
            after(kept, number)
        found.append((losses, kept, step))
    return found


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_changes_between_steps_counts(name):
    (theirs, *_), (ours, *_) = both(*FOLLOWED[name])
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_a_list_made_anew_at_every_step_stays_one_program():
    _, (_, _, step) = both(*FOLLOWED["another list of weights"], steps=12)
    assert step.torch is None
    assert len(step.programs) <= 3  # constants, an input, two inputs


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def logs(t, module, batch):
    t.log.info("rows %d", len(batch[0]))
    return mse(module, batch)


def logger():
    log = logging.Logger("a loss's")
    log.addHandler(Lines())
    return types.SimpleNamespace(log=log)


def counts(t, module, batch):
    counts.calls += 1
    return mse(module, batch) * (1 + counts.calls % 2)


def counter():
    counts.calls = 0
    return counts


def drawn(t, module, batch):
    return mse(module, batch) * (1.0 if t.random() < 0.6 else 0.5)


def writes(t, module, batch):
    with open(t, "a") as file:
        file.write("x")
    return mse(module, batch)


EFFECTS = {  # what the user keeps; the loss; what is left of it
    "an iterator": (lambda: itertools.count(1), lambda t, m, b: next(t) * mse(m, b), next),
    "a generator of numpy's": (lambda: np.random.default_rng(0), drawn, lambda t: t.random()),
    "a generator of Python's": (lambda: random.Random(0), drawn, lambda t: t.random()),
    "an attribute of a function": (counter, counts, lambda t: t.calls),
    "a log": (logger, logs, lambda t: t.log.handlers[0].lines),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_what_a_loss_uses_up_or_changes_is_used_once_a_step(name):
    make, loss_of, left = EFFECTS[name]
    (theirs, their_kept, _), (ours, our_kept, _) = both(make, loss_of, lambda t, number: None)
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert left(our_kept) == left(their_kept)


def writes_by_path(t, module, batch):
    with t.open("a") as file:
        file.write("x")
    return mse(module, batch)


def writes_after_a_branch(t, module, batch):
    loss = mse(module, batch)
    return loss if float(loss) > 1e9 else loss + 0 * writes(t, module, batch)


@pytest.mark.parametrize("write", [writes, writes_by_path, writes_after_a_branch])
def test_a_file_that_a_loss_writes_has_a_line_for_every_step(tmp_path, write):
    module = net()
    step = jaxtrain.compile(
        module, lambda m, b: write(tmp_path / "lines", m, b), torch.optim.SGD(module.parameters(), 0.1)
    )
    for batch in batches(5):
        step(batch)
    assert (tmp_path / "lines").read_text() == "xxxxx"


class KeepsItsFirstMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = net()

    def forward(self, x):
        if not hasattr(self, "mean"):
            self.register_buffer("mean", x.mean(0))
        return self.layer(x - self.mean)


class AveragesItsCodes(nn.Module):
    """As the widespread VectorQuantizerEMA does: a parameter that every forward pass makes anew."""

    def __init__(self):
        super().__init__()
        self.layer = net()
        self.codes = nn.Parameter(torch.ones(4))

    def forward(self, x):
        y = self.layer(x)
        self.codes = nn.Parameter(0.9 * self.codes + 0.1 * y.mean())
        return y * self.codes.detach().mean()


@pytest.mark.parametrize(("kind", "name"), [(KeepsItsFirstMean, "mean"), (AveragesItsCodes, "codes")])
def test_what_a_forward_registers_or_makes_anew_is_kept(kind, name):
    found = []
    for ours in (False, True):
        torch.manual_seed(0)
        module = kind()
        optimizer = torch.optim.SGD(module.parameters(), 0.05)
        step = jaxtrain.compile(module, mse, optimizer) if ours else torch_step(module, optimizer)
        found.append(([float(step(batch)) for batch in batches(4)], getattr(module, name).detach()))
    (theirs, their_tensor), (ours, our_tensor) = found
    assert ours == pytest.approx(theirs, rel=1e-4)
    torch.testing.assert_close(our_tensor, their_tensor)


def test_a_loss_that_reads_the_optimizers_state_reads_the_newest():
    found = []
    for ours in (False, True):
        module = net()
        optimizer = torch.optim.Adam(module.parameters(), 0.05)

        def loss(module, batch, optimizer=optimizer):
            states = [(p, optimizer.state[p]["exp_avg_sq"]) for p in module.parameters() if p in optimizer.state]
            return mse(module, batch) + 10 * sum((second * p**2).sum() for p, second in states)

        step = jaxtrain.compile(module, loss, optimizer) if ours else torch_step(module, optimizer, loss)
        found.append([float(step(batch)) for batch in batches(6)])
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_an_optimizer_that_finds_no_gradients_is_refused():
    module = net()
    body, head = (torch.optim.SGD(module[place].parameters(), 0.1) for place in (0, -1))
    step = jaxtrain.compile(module, mse, body)
    step(batches(1)[0])
    with pytest.raises(UserError, match=r"SGD.step\(\) finds no gradients: .*compile\(module, loss, \["):
        head.step()


def test_complex_parameters_step_as_torchs():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.tensor([1 + 0.5j, 2 - 1j, -1 + 3j]))

        def forward(self, x):
            return (self.factor * x[0][:, :3]).real.mean() + self.factor.abs().pow(2).mean()

    found = []
    for ours in (False, True):
        module = Turned()
        optimizer = torch.optim.Adam(module.parameters(), 0.1)
        loss = lambda m, b: m(b)
        step = jaxtrain.compile(module, loss, optimizer) if ours else torch_step(module, optimizer, loss)
        for batch in batches(4):
            step(batch)
        found.append(module.factor.detach().clone())
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


def test_anomaly_mode_finds_what_torch_finds():
    module = net()
    step = jaxtrain.compile(
        module, lambda m, b: (m(b[0]) - 100).sqrt().mean(), torch.optim.SGD(module.parameters(), 0.1)
    )
    with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match="returned nan values"):
        step(batches(1)[0])


@pytest.mark.parametrize("kept", ["environment", "long dict"])
def test_what_the_environment_or_a_long_dict_says_counts_at_once(kept, monkeypatch):
    found = []
    for ours in (False, True):
        monkeypatch.delenv("WEIGHT", raising=False)
        weights = {f"task {number}": 1.0 for number in range(100)}

        def weighed(module, batch, weights=weights):
            return mse(module, batch) * float(os.environ.get("WEIGHT", "1")) * weights["task 3"]

        module = net()
        optimizer = torch.optim.SGD(module.parameters(), 0.05)
        step = jaxtrain.compile(module, weighed, optimizer) if ours else torch_step(module, optimizer, weighed)
        losses = []
        for number, batch in enumerate(batches(3)):
            losses.append(float(step(batch)))
            if number == 0 and kept == "environment":
                monkeypatch.setenv("WEIGHT", "2")
            elif number == 0:
                weights["task 3"] = 2.0
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-4)
