"""Names and attributes that come to exist between steps count from then on, as in torch."""

import types

import pytest
import torch
from torch import nn

import jaxtrain


class Settings:
    pass


class Slotted:
    __slots__ = ("scale",)


MODULE = types.ModuleType("settings_of_a_user")
MODULE.__file__ = __file__
SLOTTED, KEPT, ENTRIES = Slotted(), torch.ones(3), {}
SUBJECTS = {
    "a module of torch's": lambda module: module[0],
    "a container of torch's": lambda module: module,
    "a parameter": lambda module: module[0].weight,
    "a buffer": lambda module: module.buffer,
    "a tensor that the loss holds": lambda module: KEPT,
    "a class": lambda module: Settings,
    "a Python module": lambda module: MODULE,
    "a slot": lambda module: SLOTTED,
}


def compiled(loss):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 2))
    module.register_buffer("buffer", torch.ones(2))
    return module, jaxtrain.compile(module, loss, torch.optim.SGD(module.parameters(), lr=0.0))


def follow(loss, put, compiles=True):
    """Compare six steps with torch's losses; from the third, `put` gives the number a new value. compiles: a program
    computes them."""
    module, step = compiled(loss)
    for value in (None, None, 2.0, 3.0, 0.5, 4.0):
        if value is not None:
            put(module, value)
        batch = torch.ones(4, 3)
        assert float(step(batch)) == pytest.approx(float(loss(module, batch).detach()), rel=1e-5), value
    assert (step.torch is None) == compiles


@pytest.mark.parametrize("name", SUBJECTS)
def test_an_attribute_that_appears_counts(name):
    subject = SUBJECTS[name]
    follow(
        lambda module, batch: module(batch).mean() * getattr(subject(module), "scale", 1.0),
        lambda module, value: setattr(subject(module), "scale", value),
    )


def test_a_global_that_appears_counts():
    def loss(module, batch):
        try:
            scale = LATE_SCALE
        except NameError:
            scale = 1.0
        return module(batch).mean() * scale

    follow(loss, lambda module, value: globals().update(LATE_SCALE=value), compiles=False)


def test_a_variable_of_the_enclosing_function_that_appears_counts():
    def loss(module, batch):
        try:
            factor = scale
        except NameError:
            factor = 1.0
        return module(batch).mean() * factor

    def put(module, value):
        nonlocal scale
        scale = value

    scale = 0.0
    del scale
    follow(loss, put, compiles=False)


def test_names_that_nobody_reads_leave_the_program_as_it_is():
    module, step = compiled(lambda module, batch: module(batch).mean())
    for number in range(4):
        setattr(module[0], f"counted_by_a_profiler_{number}", number)
        step(torch.ones(4, 3))
    assert len(step.programs) == 1
