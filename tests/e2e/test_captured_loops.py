"""Losses that TorchDynamo captures: what it gets wrong is not captured, and nothing else in the process changes."""

import builtins
import collections
import functools
import gc
import random
import sys
import threading
import weakref

import numpy as np
import pytest
import torch

import jaxtrain
from tests.e2e.loops import batches, mse, net, torch_step


class Counted(torch.nn.Module):
    count = 0

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 1)

    def forward(self, x):
        type(self).count += 1
        return self.layer(x) * (1 + self.count)


def counted():
    Counted.count = 0
    torch.manual_seed(1)
    return Counted()


def a_full_deque():
    held = collections.deque([1.0, 2.0, 3.0], maxlen=3)

    def loss(module, batch):
        held.append(held[-1] + 1)
        return mse(module, batch) * sum(held)

    return net(), loss, lambda: list(held)


def an_ordered_dict():
    held = collections.OrderedDict(a=1.0, b=2.0, c=3.0)

    def loss(module, batch):
        held.move_to_end(next(iter(held)))
        return mse(module, batch) * next(iter(held.values()))

    return net(), loss, lambda: list(held.values())


def an_attribute_of_a_class():
    return counted(), mse, lambda: [Counted.count]


def a_cached_function():
    calls = []

    @functools.cache
    def scale(number):
        calls.append(number)
        return 0.5

    return net(), lambda module, batch: mse(module, batch) * scale(1), lambda: calls


def a_generator_of_random_numbers():
    draws = random.Random(5)
    return net(), lambda module, batch: mse(module, batch) * draws.random(), lambda: [draws.random()]


def a_hook_that_counts():
    module, calls = net(), []
    module[0].weight.register_hook(lambda grad: calls.append(1))
    return module, mse, lambda: [len(calls)]


def an_integer_of_many_digits():
    held = {"n": 2**40 + 1}

    def loss(module, batch):
        held["n"] += 2**33 + 1
        return mse(module, batch)

    return net(), loss, lambda: [held["n"] % 1000003]


def a_float_of_many_digits():
    held = {"mean": 1.0}

    def loss(module, batch):
        held["mean"] = 0.999 * held["mean"] + 1e-9
        return mse(module, batch) * held["mean"]

    return net(), loss, lambda: [held["mean"] * 1e9 % 1]


def a_list_that_stays_short():
    held = []

    def loss(module, batch):
        held.append(float(len(held) + 1))
        if len(held) > 2:
            held.pop(0)
        return mse(module, batch) * sum(held)

    return net(), loss, lambda: held


CASES = [
    a_full_deque,
    an_ordered_dict,
    an_attribute_of_a_class,
    a_cached_function,
    a_generator_of_random_numbers,
    a_hook_that_counts,
    an_integer_of_many_digits,
    a_float_of_many_digits,
    a_list_that_stays_short,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_losses_and_python_values_are_torchs(case):
    data = batches(6)
    module, loss, observe = case()
    step = torch_step(module, torch.optim.SGD(module.parameters(), 0.05), loss)
    want = [step(batch) for batch in data], observe()
    module, loss, observe = case()
    step = jaxtrain.compile(module, loss, torch.optim.SGD(module.parameters(), 0.05))
    got = [float(step(batch)) for batch in data], observe()
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-9)


def test_a_step_tells_what_was_captured_and_at_which_line_it_was_not():
    module = net()
    step = jaxtrain.compile(module, mse, torch.optim.SGD(module.parameters(), 0.05))
    step(batches(1)[0])
    assert "graph 1: " in step.explain()
    step(batches(1, rows=5)[0])
    assert "graph 2: " in step.explain()
    assert "batch" in step.explain().splitlines()[1]  # the guard that did not hold

    def printed(module, batch):
        loss = mse(module, batch)
        print("loss", loss)
        return loss

    step.loss_fn = printed
    step(batches(1)[0])
    assert "not captured" in step.explain()
    assert 'print("loss", loss)' in step.explain()


def test_a_list_that_grows_is_captured_twice_at_most():
    kept, module = [], net()

    def loss(module, batch):
        loss = mse(module, batch)
        kept.append(loss.detach())
        return loss

    step = jaxtrain.compile(module, loss, torch.optim.SGD(module.parameters(), 0.05))
    losses = [float(step(batch)) for batch in batches(5)]
    assert [float(value) for value in kept] == pytest.approx(losses)
    assert "grows from call to call" in step.explain()


def test_a_step_that_is_dropped_is_freed():
    module = net()
    step = jaxtrain.compile(module, mse, torch.optim.SGD(module.parameters(), 0.05))
    for batch in batches(2):
        step(batch)
    assert "graph 1" in step.explain()
    weak = weakref.ref(step)
    del step
    gc.collect()
    assert weak() is None


def test_while_one_thread_captures_nothing_of_another_changes():
    """torch's own tracer replaces nn.Module.__call__ and __getattr__ meanwhile; modules compute as before."""
    watched = [builtins, torch.Tensor, torch.nn.functional, collections, sys.modules[__name__]]
    before = [dict(vars(one)) for one in watched]
    x, other = torch.randn(6, 6), net()
    want, seen, ended = other(torch.tanh(x @ x)), [], threading.Event()

    def watch():
        while not ended.is_set():
            a, b = [1], [1, 2]
            same = all(dict(vars(one)) == was for one, was in zip(watched, before, strict=True))
            seen.append(same and max(a, b) is b and torch.equal(other(torch.tanh(x @ x)), want))

    thread = threading.Thread(target=watch)
    module = net()
    step = jaxtrain.compile(module, mse, torch.optim.SGD(module.parameters(), 0.05))
    thread.start()
    for rows in (8, 5, 3):
        step(batches(1, rows=rows)[0])
    ended.set()
    thread.join()
    assert step.explain().count("graph ") >= 2
    assert len(seen) > 10
    assert all(seen)


def followed(change, loss_of):
    """Compare five steps with torch's, with a change before the third."""
    losses = []
    for compiled in (False, True):
        module, held = net(), {"list": [1, 2], "dict": {}, "kind": type("Scale", (), {"by": lambda self: 1.0})}
        loss = lambda module, batch, held=held: mse(module, batch) * loss_of(held)
        optimizer = torch.optim.SGD(module.parameters(), 0.05)
        step = jaxtrain.compile(module, loss, optimizer) if compiled else torch_step(module, optimizer, loss)
        losses.append([])
        for number, batch in enumerate(batches(5)):
            if number == 2:
                change(held)
            losses[-1].append(float(step(batch)))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def caught(held):
    try:
        return held["dict"]["scale"]
    except KeyError:
        return 1.0


CHANGED = {
    "a member of a list": (lambda held: held["list"].__setitem__(1, 7), lambda held: 3.0 if 7 in held["list"] else 1.0),
    "a key that was missed": (lambda held: held["dict"].update(scale=3.0), caught),
    "a key": (lambda held: held["dict"].update(scale=3.0), lambda held: held["dict"].get("scale", 1.0)),
    "a method": (lambda held: setattr(held["kind"], "by", lambda self: 3.0), lambda held: held["kind"]().by()),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_changes_between_calls_counts(name):
    followed(*CHANGED[name])
