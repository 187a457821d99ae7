"""How long weights that torch has not seen are kept, and for whom."""

import gc
import weakref

import torch

import jaxtrain
from tests.e2e.loops import assert_same, batches, mse, pair, torch_step


def trained(module, optimizer, data):
    step = jaxtrain.compile(module, mse, optimizer)
    for batch in data:
        step(batch)
    return weakref.ref(step), weakref.ref(step.weights)


def assert_same_moments(theirs, ours):
    moments = [optimizer.state_dict()["state"][0]["exp_avg"] for optimizer in (theirs, ours)]
    torch.testing.assert_close(*moments, atol=1e-6, rtol=1e-4)


def test_a_step_that_is_gone_has_left_its_weights_to_torch():
    (theirs, their_optimizer), (ours, optimizer) = pair()
    plain = torch_step(theirs, their_optimizer)
    for batch in batches():
        plain(batch)
    step, weights = trained(ours, optimizer, batches())
    assert_same(theirs, ours)
    assert_same_moments(their_optimizer, optimizer)
    gc.collect()
    assert step() is None
    assert weights() is None


def test_weights_that_nobody_can_read_are_freed():
    module, optimizer = pair()[1]
    step, weights = trained(module, optimizer, batches())
    del module, optimizer
    gc.collect()
    assert step() is None
    assert weights() is None


def test_steps_over_the_same_module_and_optimizer_take_turns():
    (theirs, their_optimizer), (ours, optimizer) = pair()
    plain = torch_step(theirs, their_optimizer)
    steps = [jaxtrain.compile(ours, mse, optimizer) for _ in range(2)]
    for number, batch in enumerate(batches()):
        plain(batch)
        steps[number % 3 // 2](batch)
    assert_same(theirs, ours)
    assert_same_moments(their_optimizer, optimizer)


def test_a_step_that_is_compiled_anew_goes_on():
    (theirs, their_optimizer), (ours, optimizer) = pair()
    plain, data = torch_step(theirs, their_optimizer), batches()
    for first in range(0, len(data), 3):
        trained(ours, optimizer, data[first : first + 3])
    for batch in data:
        plain(batch)
    assert_same(theirs, ours)
    assert_same_moments(their_optimizer, optimizer)
