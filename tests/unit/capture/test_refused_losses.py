"""Losses that Dynamo would capture with an answer that does not last: five steps have torch's losses."""

import contextvars
import math
import os
import pathlib

import pytest
import torch
from torch import nn

import jaxtrain
from tests.e2e.loops import torch_step

WEIGHT = contextvars.ContextVar("WEIGHT", default=1.0)
CALLS: list[int] = []


class CountsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, slope):
        CALLS.append(1)
        return slope * len(CALLS)


class AsksForNone(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 1.0, x * 2.0

    @staticmethod
    def backward(ctx, first, second):
        return first if second is None else 7 * first


def in_two_modes(module, x):
    module.eval()
    first = module(x)
    module.train()
    return (first - module(2 * x)).square().mean() + module(x).mean()


READ = {  # the loss; what changes before each step
    "the environment": (lambda m, x: m(x).relu().mean() * float(os.environ["OF_A_TEST"]), None),
    "a context variable": (lambda m, x: m(x).relu().mean() * WEIGHT.get(), lambda n: WEIGHT.set(n / 2)),
    "a file": (lambda m, x: m(x).relu().mean() * (2 if pathlib.Path("begun").exists() else 1), None),
    "a name that a module lacks": (
        lambda m, x: m(x).relu().mean() * getattr(math, "of_a_test", 1.0),
        lambda n: n == 2 and setattr(math, "of_a_test", 3.0),
    ),
    "a backward that counts": (lambda m, x: CountsInBackward.apply(m(x)).square().mean(), None),
    "a gradient that is None": (lambda m, x: AsksForNone.apply(m(x))[0].square().mean(), None),
    "BatchNorm in two modes": (in_two_modes, None),
}


def losses(name: str, compiled: bool) -> list[float]:
    torch.manual_seed(0)
    CALLS.clear()
    vars(math).pop("of_a_test", None)
    pathlib.Path("begun").unlink(missing_ok=True)
    loss, change = READ[name]
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    step = jaxtrain.compile(module, loss, optimizer) if compiled else torch_step(module, optimizer, loss)
    found = []
    for number, x in enumerate(torch.randn(5, 6, 3, generator=torch.Generator().manual_seed(1))):
        os.environ["OF_A_TEST"] = str(1 + number)
        if name == "a file" and number == 2:
            pathlib.Path("begun").touch()
        if change:
            change(number)
        found.append(float(step(x)))
    return found


@pytest.mark.parametrize("name", READ)
def test_what_does_not_last_is_asked_anew_at_each_step(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_A_TEST", "1")
    assert losses(name, compiled=True) == pytest.approx(losses(name, compiled=False), rel=1e-4, abs=1e-6)
