"""A first call that sets something up runs in torch; the next ones are compiled, to torch's losses and weights."""

import logging

import pytest
import torch
from torch import nn

import jaxtrain
from jaxtrain.accelerate import Accelerator
from tests.e2e.loops import assert_same, sgd, torch_step


class ActNorm(nn.Module):
    """As in Glow: location and scale come from the first batch. flag: a buffer or a Python attribute tells so."""

    def __init__(self, flag: str):
        super().__init__()
        self.flag = flag
        self.location, self.scale = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4))
        if flag == "python":
            self.ready = False
        else:
            self.register_buffer("ready", torch.tensor(0) if flag == "number" else torch.tensor(False))

    def forward(self, x):
        if self.ready.item() == 0 if self.flag == "number" else not self.ready:
            with torch.no_grad():
                self.location.data.copy_(-x.mean(0))
                self.scale.data.copy_(1 / (x.std(0) + 1e-6))
            if self.flag == "python":
                self.ready = True
            else:
                self.ready.fill_(1)
        return self.scale * (x + self.location)


class Masked(nn.Linear):
    """A causal mask that is kept with its size."""

    def __init__(self):
        super().__init__(4, 4)
        self.size, self.mask = 0, None

    def forward(self, x):
        if self.size != x.shape[-2]:
            self.size = x.shape[-2]
            self.mask = torch.ones(self.size, self.size).tril()
        return super().forward(self.mask @ x)


class Codes(nn.Linear):
    """A codebook that begins with the first rows: a loop over values that only the first call runs."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("begun", torch.tensor([False]))
        self.register_buffer("codes", torch.zeros(5, 4))

    def forward(self, x):
        z = super().forward(x)
        if not self.begun:
            while float(self.codes.abs().sum()) == 0:
                self.codes.data.copy_(z[:5].detach())
            self.begun.data.copy_(torch.tensor([True]))
        nearest = self.codes[torch.cdist(z, self.codes).argmin(1)]
        return z + (nearest - z).detach()


class Late(nn.Linear):
    """A buffer that the first call registers, and the shapes seen so far."""

    def __init__(self):
        super().__init__(4, 4)
        self.shapes = set()

    def forward(self, x):
        if not hasattr(self, "positions"):
            self.register_buffer("positions", torch.arange(x.shape[0])[:, None] / 10)
        self.shapes.add(tuple(x.shape))
        return super().forward(x + self.positions)


BUILDS = {
    "ActNorm, a Python flag": lambda: nn.Sequential(nn.Linear(4, 4), ActNorm("python"), nn.Tanh()),
    "ActNorm, a number in a buffer": lambda: nn.Sequential(nn.Linear(4, 4), ActNorm("number"), nn.Tanh()),
    "ActNorm, a flag in a buffer": lambda: nn.Sequential(nn.Linear(4, 4), ActNorm("flag"), nn.Tanh()),
    "a mask of its size": Masked,
    "codes from the first batch": Codes,
    "a registered buffer": Late,
}


ASK_A_BUFFER = {"ActNorm, a flag in a buffer", "codes from the first batch"}  # its value, at each call


def _batches(steps: int, sizes: tuple = (6,)) -> list:
    draw = torch.Generator().manual_seed(2)
    return [torch.randn(sizes[number % len(sizes)], 4, generator=draw) * 2 + 1 for number in range(steps)]


def _loss(module, x):
    return module(x).square().mean()


def _train(build, engine: str, batches: list, between=lambda module, number: None):
    """Return the losses, the module and the compiled step, if there is one."""
    torch.manual_seed(0)
    module = build()
    optimizer = sgd(module)
    if engine == "compile":
        step = jaxtrain.compile(module, _loss, optimizer)
    else:
        prepared = Accelerator(cpu=True).prepare(module) if engine == "accelerate" else module
        step = torch_step(prepared, optimizer, _loss)
    losses = []
    for number, batch in enumerate(batches):
        losses.append(float(step(batch)))
        between(module, number)
    if engine == "compile":
        step.sync()
    return losses, module, step


@pytest.mark.parametrize("engine", ["compile", "accelerate"])
@pytest.mark.parametrize("case", BUILDS)
def test_at_most_the_first_call_runs_in_torch(case, engine, caplog):
    """Five losses within 1e-5, the weights, and no warning: torch has run at most one call."""
    wanted, theirs, _ = _train(BUILDS[case], "torch", _batches(5))
    with caplog.at_level(logging.INFO):
        losses, ours, step = _train(BUILDS[case], engine, _batches(5))
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert_same(theirs, ours)
    if engine == "compile" and case in ASK_A_BUFFER:
        assert step.torch is not None  # around its modules, which run compiled
        return
    assert sum("in torch" in record.message for record in caplog.records) <= 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    if engine == "compile":
        assert step.torch is None


@pytest.mark.parametrize("engine", ["compile", "accelerate"])
def test_a_mask_that_is_made_anew_for_each_length_follows_the_lengths(engine):
    batches = _batches(10, (6, 6, 9))
    wanted, theirs, _ = _train(Masked, "torch", batches)
    losses, ours, _ = _train(Masked, engine, batches)
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert_same(theirs, ours)


def test_a_call_in_torch_keeps_the_optimizers_state_and_the_sum_of_gradients():
    """accumulate=2 with momentum: the first call of each length sums its gradient in torch."""
    torch.manual_seed(0)
    theirs, ours = Masked(), Masked()
    ours.load_state_dict(theirs.state_dict())
    optimizer = sgd(theirs)
    step = jaxtrain.compile(ours, _loss, sgd(ours), accumulate=2)
    for number, batch in enumerate(_batches(8, (6, 9, 6, 6))):
        loss = _loss(theirs, batch)
        (loss / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
        assert float(step(batch)) == pytest.approx(float(loss), rel=1e-5)
    step.sync()
    assert_same(theirs, ours)


def test_what_every_call_counts_is_counted():
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) / self.calls

    build = lambda: Counting(4, 4)
    wanted, theirs, _ = _train(build, "torch", _batches(4))
    losses, ours, step = _train(build, "compile", _batches(4))
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert_same(theirs, ours)
    assert ours.calls == 4
    assert step.torch is None


def test_a_constant_that_changes_now_and_then_is_recorded_anew():
    """A tensor in a plain attribute, replaced after the second and the fifth of eight steps."""

    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.temperature = torch.tensor(2.0)

        def forward(self, x):
            return super().forward(x) / self.temperature

    def between(module, number):
        if number in (1, 4):
            module.temperature = module.temperature * 0.5

    wanted, theirs, _ = _train(Scaled, "torch", _batches(8), between)
    losses, ours, step = _train(Scaled, "compile", _batches(8), between)
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert_same(theirs, ours)
    assert step.torch is None
