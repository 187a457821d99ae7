"""Objects of other libraries among what a model reads: looking at them raises nothing, and the numbers are torch's."""

import types
import weakref

import pytest
import torch
from torch import nn

import jaxtrain


class AnswersEveryName:
    """As llvmlite's library handle, which numba leads to."""

    __slots__ = ()

    def __getattr__(self, name):
        return 2.0


class AnswersWithItself:
    def __getattr__(self, name):
        return self

    def __call__(self, *_):
        return self

    __iter__ = __len__ = None
    scale = 2.0


class RaisesForEveryName:
    scale = 2.0

    def __getattribute__(self, name):
        if name == "scale":
            return 2.0
        raise RuntimeError(f"no {name} outside of a request")


class ClassRaises:
    """As a proxy of a web framework outside of a request."""

    scale = 2.0

    @property
    def __class__(self):
        raise RuntimeError("working outside of a request")


class AttributesAreAProperty:
    scale = 2.0

    @property
    def __dict__(self):
        raise OSError("the file is closed")


class AttributesAreNone:
    scale, __dict__ = 2.0, None


class LengthRaises(list):
    scale = 2.0

    def __len__(self):
        raise OSError("the connection is closed")


class IterationRaises(dict):
    scale = 2.0

    def __iter__(self):
        raise ValueError("not loaded yet")

    items = keys = values = __iter__


class NeverEqual:
    scale, __hash__ = 2.0, None

    def __eq__(self, other):
        raise TypeError("cannot be compared")

    __bool__ = __eq__


class SlotRaises:
    __slots__ = ("other", "scale")

    def __init__(self):
        self.scale = 2.0

    def __getattr__(self, name):
        raise KeyError(name)


class Gone:
    scale = 2.0


class HoldsDead:
    def __init__(self):
        gone = Gone()
        self.proxy, self.reference, self.scale = weakref.proxy(gone), weakref.ref(gone), 2.0


class StateRaises:
    scale = 2.0

    def __getstate__(self):
        raise NotImplementedError("a handle has no state")


class ReprRaises:
    scale = 2.0

    def __repr__(self):
        raise RuntimeError("no text")

    __str__ = __format__ = __hash__ = __repr__


KINDS = [
    AnswersEveryName, AnswersWithItself, RaisesForEveryName, ClassRaises, AttributesAreAProperty, AttributesAreNone,
    LengthRaises, IterationRaises, NeverEqual, SlotRaises, HoldsDead, StateRaises, ReprRaises,
]  # fmt: skip


class Box:
    """Torch itself asks for the class of what is an attribute of a module."""

    def __init__(self, handle):
        self.handle = handle


class Net(nn.Module):
    def __init__(self, handle):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.box = nn.Linear(3, 1), Box(handle)
        self.around = types.SimpleNamespace(inside=[handle])

    def forward(self, x):
        return self.linear(x) * (self.box.handle.scale + self.around.inside[0].scale) / 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_reads_a_foreign_object_trains_as_in_torch(kind):
    x = torch.ones(4, 3)
    plain, module = Net(kind()), Net(kind())
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    loss_fn = lambda module, batch: module(batch).pow(2).mean()
    step = jaxtrain.compile(module, loss_fn, torch.optim.SGD(module.parameters(), 0.1))
    for _ in range(3):
        loss = loss_fn(plain, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert float(step(x)) == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_may_hold_a_foreign_object(kind):
    module = nn.Linear(3, 1)
    loss_fn = lambda module, batch: (module(batch["x"]) * batch["handle"].scale).pow(2).mean()
    want = loss_fn(module, {"x": torch.ones(4, 3), "handle": kind()}).item()
    step = jaxtrain.compile(module, loss_fn, torch.optim.SGD(module.parameters(), 0.0))
    for _ in range(2):
        assert float(step({"x": torch.ones(4, 3), "handle": kind()})) == pytest.approx(want, rel=1e-5)


def test_a_line_says_what_raised(caplog):
    module = Net(ClassRaises())
    step = jaxtrain.compile(module, lambda m, x: m(x).mean(), torch.optim.SGD(module.parameters(), 0.1))
    for _ in range(3):
        step(torch.ones(4, 3))
    assert "RuntimeError: working outside of a request at " in caplog.text
