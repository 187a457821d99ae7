"""What Python does around the tensors of a module: exact, or refused with the line."""

import itertools
import logging
import random
import time
import types

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

import jaxtrain
from jaxtrain.runtime.prng import Rngs
from tests.unit.lowering.checked_net import checked
from torch_bridge.from_torch import from_torch
from torch_bridge.lowering import UnsupportedModel
from torch_bridge.state_dict import state_dict

X = torch.linspace(-1, 1, 20).reshape(4, 5)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 3)
        self.step, self.seen, self.settings, self.average = 0, [], {"calls": 0}, torch.zeros(3)
        self.count = itertools.count(1).__next__
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("calls", torch.zeros(()))


def module(function) -> nn.Module:
    code = function.__code__.replace(co_name="forward")  # torch keeps the lines of functions of that name
    forward = types.FunctionType(code, globals(), "forward")
    return type(function.__name__, (Base,), {"forward": forward})()


def counter(self, x):
    self.step += 1
    return self.linear(x) * self.step


def python_random(self, x):
    return self.linear(x) * random.random()


def numpy_mask(self, x):
    keep = np.random.rand(3) > 0.5
    return self.linear(x) * torch.from_numpy(keep)


def layer_drop(self, x):
    if self.training and random.random() < 1e-3:
        return x[:, :3]
    return self.linear(x)


def list_state(self, x):
    self.seen.append(x.mean())
    return self.linear(x) * len(self.seen)


def dict_state(self, x):
    self.settings["calls"] += 1
    return self.linear(x) + self.settings["calls"]


def tensor_state(self, x):
    y = self.linear(x)
    self.average = 0.9 * self.average + 0.1 * y.mean(0).detach()
    return y - self.average


def clock(self, x):
    return self.linear(x) * (time.time() % 1)


def closure(self, x):
    return self.linear(x) * self.count()


REFUSED = {
    counter: ("the call changes step", "return self.linear(x) * self.step"),
    python_random: ("Python's random numbers", "return self.linear(x) * random.random()"),
    numpy_mask: ("numpy's random numbers", "keep = np.random.rand(3) > 0.5"),
    layer_drop: ("Python's random numbers", "if self.training and random.random() < 1e-3"),
    list_state: ("the call changes seen", "return self.linear(x) * len(self.seen)"),
    dict_state: ("the call changes settings", "return self.linear(x) + self.settings"),
    tensor_state: ("the call changes average", ""),
    clock: ("it reads the clock", "time.time() % 1"),
    closure: ("a second call computes something else", "self.linear(x) * self.count()"),
}


@pytest.mark.parametrize("forward", REFUSED, ids=lambda forward: forward.__name__)
def test_state_that_python_keeps_is_refused_with_its_line(forward):
    made, generators = module(forward), (random.getstate(), np.random.get_state()[1].tolist())
    reason, line = REFUSED[forward]
    with pytest.raises(UnsupportedModel) as caught:
        from_torch(made, X, modes=("training",))
    assert reason in str(caught.value)
    assert line in str(caught.value)
    assert (made.step, made.seen, made.settings) == (0, [], {"calls": 0})
    assert (random.getstate(), np.random.get_state()[1].tolist()) == generators


def buffer_counter(self, x):
    self.calls += 1
    return self.linear(x) * self.calls


def note_only(self, x):
    y = self.linear(x)
    self.last = y.detach()
    self.step += 1
    return y


@pytest.mark.parametrize("forward", [buffer_counter, note_only], ids=lambda f: f.__name__)
def test_what_does_not_change_the_numbers_of_a_call_is_converted(forward):
    theirs, ours = module(forward).train(), module(forward)
    model = from_torch(ours, X)
    for number in range(3):
        got = model(X.numpy(), rngs=Rngs(jax.random.key(number)))
        np.testing.assert_allclose(np.asarray(got), theirs(X).detach().numpy(), atol=1e-6)


def test_a_check_of_values_is_taken_as_passed_and_says_so(caplog):
    theirs = module(checked)
    with caplog.at_level(logging.WARNING):
        model = from_torch(theirs, X, modes=("evaluation",))
    np.testing.assert_allclose(np.asarray(model(X.numpy())), theirs(X).detach().numpy(), atol=1e-6)
    assert len([line for line in caplog.messages if "taken as passed" in line]) == 2


def branch(self, x):
    if (x > 0).all():
        return self.linear(x)
    return -self.linear(x)


def test_a_branch_that_is_no_check_is_refused():
    with pytest.raises(UnsupportedModel, match="depends on the values of a tensor"):
        from_torch(module(branch), X)


class KeepsStatistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.scale = nn.BatchNorm1d(5), 1.0

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        self.scale = 2.0 if mode else 1.0
        return self

    def forward(self, x):
        return self.norm(x) * self.scale


def test_an_overridden_train_is_called_as_torch_calls_it():
    theirs, ours = KeepsStatistics(), KeepsStatistics()
    model = from_torch(ours, X)
    assert (ours.scale, ours.norm.training) == (1.0, True)
    for mode in (True, False):
        want = theirs.train(mode)(X).detach().numpy()
        got = model(X.numpy(), rngs=Rngs(jax.random.key(0)) if mode else None)
        np.testing.assert_allclose(np.asarray(got), want, atol=1e-6)
    assert float(np.abs(np.asarray(model.norm.running_mean[...])).max()) == 0


def test_a_frozen_parameter_has_no_gradient_but_its_place_in_the_state_dict():
    made = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 1))
    made[0].requires_grad_(False)
    model = from_torch(made, X)
    assert list(state_dict(model)) == list(made.state_dict())
    grads = nnx.grad(lambda model: model(X.numpy()).sum())(model)
    assert len(jax.tree.leaves(grads)) == 2


class Cache:
    """As transformers' DynamicCache: tensors in an object that torch cannot take apart."""

    def __init__(self, keys):
        self.keys = keys


def cached(self, x):
    y = self.linear(x)
    return {"logits": y, "cache": Cache(y * 2)}


def test_an_output_that_is_no_tensor_is_left_out():
    theirs = module(cached)
    outputs = from_torch(theirs, X, modes=("evaluation",))(X.numpy())
    np.testing.assert_allclose(np.asarray(outputs["logits"]), theirs(X)["logits"].detach().numpy(), atol=1e-6)
    assert outputs["cache"] is None


def test_a_cache_of_what_the_parameters_give_is_no_state():
    class Caches(Base):
        def __init__(self):
            super().__init__()
            self.cache = {}

        def forward(self, x):
            if "bias" not in self.cache:
                self.cache["bias"] = self.linear.bias * 2
            return self.linear(x) + self.cache["bias"]

    model = Caches().eval()
    ours = from_torch(model, X, ["evaluation"])(X.numpy())
    np.testing.assert_allclose(np.asarray(ours), model(X).detach(), atol=1e-6)


class ReadOnly(dict):
    """As the settings of diffusers' models: they refuse every change."""

    def clear(self):
        raise TypeError("read-only")

    def update(self, *args, **kwargs):
        raise TypeError("read-only")


class Settings(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.settings = ReadOnly(scale=2.0)
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x) * self.settings["scale"]


def test_a_dict_that_refuses_changes_is_left_alone():
    module = Settings()
    x = torch.ones(1, 3)
    model = from_torch(module, (x,), ["training", "evaluation"])
    np.testing.assert_allclose(model(x.numpy()), module(x).detach().numpy(), rtol=1e-6)


def test_a_loss_that_is_refused_draws_numpys_numbers_as_often_as_torch():
    def loss(layer, x):
        drawn = np.random.rand(8)[np.array([x.shape[0]])]  # numpy wants a plain number
        return layer(x).square().mean() * float(drawn[0])

    layer = nn.Linear(5, 3)
    step = jaxtrain.compile(layer, loss, torch.optim.SGD(layer.parameters(), 0.1))
    np.random.seed(0)
    step(X)
    step(X)
    end = np.random.rand()
    np.random.seed(0)
    assert end == np.random.rand(17)[-1]


def cached_input(self, x):
    if not hasattr(self, "centre"):
        self.centre = x.mean().detach()
    return self.linear(x) * self.centre


def flagged(self, x):
    y = self.linear(x)
    if getattr(self, "flag", None) is not None:
        y = y + 1
    self.flag = 1
    return y


def cached_weight(self, x):
    if not hasattr(self, "doubled"):
        self.doubled = self.linear.weight.detach() * 2
    return self.linear(x) + x @ self.doubled.t()


@pytest.mark.parametrize(("forward", "name"), [(cached_input, "centre"), (flagged, "flag"), (cached_weight, "doubled")])
def test_what_the_first_call_keeps_for_later_ones_is_refused_in_training(forward, name):
    with pytest.raises(
        UnsupportedModel, match=f"a second call computes something else, because the call changes {name}"
    ):
        from_torch(module(forward), X, modes=("training",))


def test_positions_kept_from_call_to_call_are_computed_at_each():
    def positions(self, x):
        if not hasattr(self, "places") or self.places.shape[0] < x.shape[0]:
            self.places = torch.arange(x.shape[0]).float()
        return self.linear(x) + self.places[: x.shape[0], None]

    made = module(positions)
    model = from_torch(made, X, modes=("training",))
    for rows in (4, 2, 3):
        got = model(X[:rows].numpy(), rngs=Rngs(jax.random.key(0)))
        np.testing.assert_allclose(got, made.linear(X[:rows]).detach() + torch.arange(rows)[:, None], atol=1e-6)


def test_a_batch_that_a_forward_writes_to_is_converted():
    def writes(self, x):
        x.mul_(2)
        return self.linear(x) + x[:, :3]

    made = module(writes)
    wanted = made(X.clone()).detach()
    np.testing.assert_allclose(
        from_torch(made, X.clone(), modes=("training",))(X.numpy(), rngs=Rngs(jax.random.key(0))), wanted, atol=1e-6
    )
