"""Batches of a loop hold Python numbers and texts that change from call to call."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import jaxtrain
from tests.e2e.loops import torch_step

STEPS = 12


def _mixed(module, batch):
    x, rate, _ = batch
    return rate * module(x).square().mean() + (1 - rate) * module(x).mean()


def _repeated(module, batch):
    x, rate, number = batch
    for _ in range(number):
        x = x / 2
    return rate * module(x).square().mean()


def _named(module, batch):
    """Counts on a text that it does not read."""
    names = batch["names"]
    return module(batch["x"]).square().mean() * (len(names) if all(isinstance(name, str) for name in names) else 0)


def _number_in(name):
    try:
        return 1 + int(name[:-4])
    except Exception:
        return 0.5


READ = {
    "compared": lambda name: 2 if name == "3.png" else 1,
    "looked up": lambda name: {"3.png": 2}.get(name, 1),
    "caught": lambda name: _number_in(name),
    "in C": lambda name: int("".join([name, "7"]).replace(".png", "")) / 50,
    "a branch on a number": lambda name: 2 if float(name[:-4]) > 5.5 else 1,
}


def _train(loss_fn, batch_of, compiled):
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    step = jaxtrain.compile(module, loss_fn, optimizer) if compiled else torch_step(module, optimizer, loss_fn)
    losses = [float(step(batch_of(number))) for number in range(STEPS)]
    return losses, module, step


def _check(loss_fn, batch_of):
    """Return the compiled step, after a comparison with torch."""
    losses, theirs, _ = _train(loss_fn, batch_of, compiled=False)
    found, ours, step = _train(loss_fn, batch_of, compiled=True)
    assert found == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-5, atol=1e-6)
    return step


_x = lambda number: torch.randn(4, 3, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize(("loss_fn", "records"), [(_mixed, 2), (_repeated, 6)])
def test_a_number_that_changes_is_an_input_of_the_program(loss_fn, records):
    step = _check(loss_fn, lambda number: (_x(number), number / 7, number % 3))
    assert step.torch is None
    assert len(step.programs) <= records


def test_a_text_that_nobody_reads_is_no_part_of_the_program():
    step = _check(_named, lambda number: {"x": _x(number), "names": [f"{number}.png", f"{number + 1}.png"]})
    assert step.torch is None
    assert len(step.programs) == 1


@pytest.mark.parametrize("read", READ)
def test_a_text_that_python_reads_counts_at_every_call(read):
    loss_fn = lambda module, batch: module(batch["x"]).square().mean() * READ[read](batch["name"])
    _check(loss_fn, lambda number: {"x": _x(number), "name": f"{number}.png"})


def test_a_text_of_a_few_values_has_a_program_for_each():
    loss_fn = lambda module, batch: F.relu(module(batch["x"])).mean() * (2 if batch["kind"] == "a" else 1)
    assert _check(loss_fn, lambda number: {"x": _x(number), "kind": "ab"[number % 2]}).torch is None
