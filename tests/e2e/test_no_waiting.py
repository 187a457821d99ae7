"""Nobody waits for XLA: torch runs the steps of `jaxtrain.compile` until their program is there."""

import copy
import subprocess
import sys
import threading

import jax
import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import jaxtrain
from jaxtrain.compiled_step import meanwhile
from jaxtrain.runtime import background
from tests.compiling import child_environment


class Compiler:
    """The compiler behind a gate."""

    def __init__(self):
        self.gate = threading.Event()

    def finish(self):
        self.gate.set()
        while background._queue._thread is not None:
            threading.Event().wait(0.01)


@pytest.fixture
def compiler(monkeypatch):
    """A compiler that finishes nothing before it is asked to, and captures at the first call."""
    compiler, run = Compiler(), background.Compilation.run

    def gated(compilation):
        compiler.gate.wait()
        run(compilation)

    monkeypatch.setenv("JAXTRAIN_WAIT", "0")
    monkeypatch.setattr(meanwhile, "CAPTURE_S", 0.0)
    monkeypatch.setattr(meanwhile, "MODULE_S", 0.0)
    monkeypatch.setattr(background.compile_cache, "holds", lambda lowered: False)
    monkeypatch.setattr(background._Queue, "_into_cache", lambda *given: None)  # the thread compiles: no second JAX
    monkeypatch.setattr(background.Compilation, "run", gated)
    yield compiler
    compiler.finish()


def net(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(dropout), nn.Linear(8, 2)
    )


def mse(module, batch):
    return F.mse_loss(module(batch[0]), batch[1])


def batches(count, rows=8):
    generator = torch.Generator().manual_seed(1)
    draw = lambda size: torch.randn(rows, size, generator=generator)
    return [(draw(6), draw(2)) for _ in range(count)]


def compiled(module, optimizer=None, scheduler=None, **options):
    optimizer = optimizer or torch.optim.AdamW(module.parameters(), 1e-2)
    return jaxtrain.compile(module, mse, optimizer, scheduler, devices=jax.devices()[:1], **options)


def compile_first(compiler, step, data):
    """Run two calls, so that the program of the second is there."""
    step(data[0])
    compiler.finish()
    step(data[1])
    assert step.ahead


def in_torch(module, data, accumulate):
    """Return the losses of a plain torch loop, and its optimizer."""
    optimizer, losses = torch.optim.AdamW(module.parameters(), 1e-2), []
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6)
    for number, batch in enumerate(data, 1):
        loss = mse(module, batch)
        (loss / accumulate).backward()
        if number % accumulate == 0:
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, optimizer


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("before", [4, 5])
def test_losses_weights_and_moments_stay_torchs_over_the_switch(compiler, accumulate, before):
    ours, data = net(), batches(24)
    theirs = copy.deepcopy(ours)
    optimizer = torch.optim.AdamW(ours.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6)
    step = compiled(ours, optimizer, scheduler, accumulate=accumulate, clip_norm=0.5)
    losses, other = in_torch(theirs, data, accumulate)
    sides = []
    for number, (batch, wanted) in enumerate(zip(data, losses, strict=True)):
        if number >= before:
            compiler.finish()
        assert float(step(batch)) == pytest.approx(wanted, rel=1e-5), number
        sides.append(step.ahead)
    assert not any(sides[:before])
    assert all(sides[-6:])
    step.sync()
    assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"]
    for mine, yours in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, yours, rtol=1e-4, atol=1e-6)
    for mine, yours in zip(optimizer.state.values(), other.state.values(), strict=True):
        for name in mine:
            torch.testing.assert_close(mine[name], yours[name], rtol=1e-4, atol=1e-6)


def test_the_compiler_is_asked_once_and_the_switch_told_in_one_line(compiler, caplog, monkeypatch):
    monkeypatch.setattr(background, "_queue", background._Queue())
    step = compiled(net())
    data = batches(30)
    for batch in data[:10]:
        step(batch)
    assert "torch runs it: XLA compiles the program" in step.explain()
    compiler.finish()
    for batch in data[10:]:
        step(batch)
    assert len(step.programs) == 1
    lines = [record.message for record in caplog.records if "torch did meanwhile" in record.message]
    assert len(lines) == 1
    assert lines[0].startswith("XLA has compiled a program in")


@pytest.mark.parametrize("asked", ["argument", "environment", "torch", "optax", "resumed"])
def test_who_asks_for_the_same_bits_waits(compiler, monkeypatch, asked):
    module, data = net(), batches(2)
    optimizer = optax.adamw(1e-2) if asked == "optax" else None
    step = compiled(module, optimizer, wait=asked == "argument")
    if asked == "environment":
        monkeypatch.setenv("JAXTRAIN_WAIT", "1")
    if asked == "resumed":
        step.load_state_dict(step.state_dict())
    torch.use_deterministic_algorithms(asked == "torch")
    try:
        step(data[0])
    finally:
        torch.use_deterministic_algorithms(False)
    assert step.ahead  # the compiler behind the gate was not asked


def test_torchs_generator_stays_as_it_is_on_both_sides(compiler):
    step, data = compiled(net(dropout=0.5)), batches(6)
    state = torch.get_rng_state()
    losses = [float(step(data[0])) for _ in range(3)]
    assert len(set(losses)) == 3
    assert torch.equal(torch.get_rng_state(), state)
    compiler.finish()
    step(data[0])
    assert step.ahead
    assert torch.equal(torch.get_rng_state(), state)
    again = compiled(net(dropout=0.5))
    assert [float(again(data[0])) for _ in range(1)] == losses[:1]


def test_torch_runs_a_new_shape_until_its_program_is_there(compiler):
    ours, data = net(), [*batches(2), *batches(6, rows=5)]
    theirs = copy.deepcopy(ours)
    step = compiled(ours, torch.optim.AdamW(ours.parameters(), 1e-2))
    optimizer = torch.optim.AdamW(theirs.parameters(), 1e-2)
    sides = []
    for number, batch in enumerate(data):
        loss = mse(theirs, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number in (1, 5):
            compiler.finish()
        if number == 2:
            compiler.gate.clear()
            step.meanwhile._patience_s = 0.0
        assert float(step(batch)) == pytest.approx(loss.item(), rel=1e-5)
        sides.append(step.ahead)
    assert sides == [False, True, False, False, False, True, True, True]


def test_a_step_is_captured_once_torch_has_run_for_as_long_as_that_takes(compiler, monkeypatch):
    monkeypatch.setattr(meanwhile, "CAPTURE_S", 1e9)
    step = compiled(net())
    for batch in batches(5):
        step(batch)
    assert "its first 1000000000 s, about what a capture takes" in step.explain()
    assert not step.programs
    step.meanwhile._patience_s = 0.0
    compile_first(compiler, step, batches(2))


def test_a_loop_resumes_between_micro_batches_that_torch_has_run(compiler):
    data = batches(6)
    step = compiled(net(), accumulate=3)
    for batch in data[:4]:
        step(batch)
    assert not step.ahead
    state = step.state_dict()
    assert len(state["grads"]) == 5  # of two linear layers and a normalization
    other = compiled(net(), accumulate=3)
    other.load_state_dict(copy.deepcopy(state))
    for batch in data[4:]:
        assert float(other(batch)) == pytest.approx(float(step(batch)), rel=1e-5)
    assert other.ahead
    step.sync(), other.sync()
    for mine, yours in zip(step.state_dict()["module"].values(), other.state_dict()["module"].values(), strict=True):
        torch.testing.assert_close(mine, yours, rtol=1e-4, atol=1e-6)


def test_a_wrong_batch_raises_torchs_error_and_costs_no_gradients(compiler):
    data = batches(3)
    step = compiled(net(), accumulate=3)
    step(data[0])
    waiting = {name: np.asarray(value) for name, value in step.grads.items()}
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        step((torch.ones(8, 5), torch.ones(8, 2)))
    assert step.count == 1
    for name, value in waiting.items():
        np.testing.assert_array_equal(step.grads[name], value)
    assert all(parameter.grad is None for parameter in step.optimizer.param_groups[0]["params"])


def test_several_updates_of_shared_weights_switch_one_by_one(compiler):
    generator, critic = nn.Linear(6, 2), nn.Linear(2, 1)
    twins = copy.deepcopy((generator, critic))
    losses = {
        "critic": lambda g, c, batch: (c(g(batch[0])) - c(batch[1])).square().mean(),
        "generator": lambda g, c, batch: c(g(batch[0])).square().mean(),
    }
    sgd = lambda module: torch.optim.SGD(module.parameters(), 0.05, momentum=0.9)
    steps = jaxtrain.compile_many(
        {"generator": generator, "critic": critic},
        {"critic": (losses["critic"], sgd(critic)), "generator": (losses["generator"], sgd(generator))},
        devices=jax.devices()[:1],
    )
    optimizers = {"critic": sgd(twins[1]), "generator": sgd(twins[0])}
    for number, batch in enumerate(batches(12)):
        if number == 4:
            compiler.finish()
        for name, optimizer in optimizers.items():
            loss = losses[name](*twins, batch)
            for each in optimizers.values():
                each.zero_grad()
            loss.backward()
            optimizer.step()
            assert float(steps[name](batch)) == pytest.approx(loss.item(), rel=1e-5), (number, name)
    assert all(step.ahead for step in steps.steps.values())


CHILD = """
import sys
import torch
import jaxtrain
from jaxtrain.compiled_step import meanwhile
from jaxtrain.runtime import background

meanwhile.CAPTURE_S = meanwhile.MODULE_S = 0.0
torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))
loss = lambda module, batch: module(batch).square().mean()
step = jaxtrain.compile(module, loss, torch.optim.Adam(module.parameters()), clip_norm=1.0)
calls = 0
while not step.ahead:
    step(torch.ones(4, 6))
    calls += 1
    while background._queue._thread is not None:
        pass
print(calls)
"""


def test_a_second_process_takes_the_program_at_once(tmp_path):
    environment = child_environment() | {"JAXTRAIN_WAIT": "0", "JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    run = lambda: subprocess.run(
        [sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, check=True
    )
    assert [int(run().stdout) for _ in range(2)] == [2, 1]
