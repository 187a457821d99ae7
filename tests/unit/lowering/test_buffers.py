"""Buffers that a forward pass assigns, and modules that torch knows by two names, end as in torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import checkpoint

from jaxtrain.runtime.prng import Rngs
from torch_bridge.from_torch import from_torch
from torch_bridge.lowering import UnsupportedModel
from torch_bridge.state_dict import state_dict

X = torch.linspace(-1, 1, 24).reshape(8, 3)


def assert_three_calls_are_torchs(module: nn.Module) -> None:
    """Outputs and state dict after three calls in training mode."""
    converted = from_torch(module, X, modes=("training",))
    module.train()
    for _ in range(3):
        outputs = zip(
            *map(jax.tree.leaves, (converted(X.numpy(), rngs=Rngs(jax.random.key(0))), module(X))), strict=True
        )
        for ours, wanted in outputs:
            np.testing.assert_allclose(ours, wanted.detach(), atol=1e-5)
    theirs = module.state_dict()
    for name, value in state_dict(converted).items():
        np.testing.assert_allclose(value, theirs[name], rtol=1e-5, atol=1e-5, err_msg=name)


class Assigns(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("other", torch.ones(3))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.mean, self.other = self.other, self.mean
        return x - self.mean + 2 * self.other


class AssignsAnotherShape(Assigns):
    def forward(self, x):
        self.mean = x.mean()
        return x


class AssignsWhatWasNone(Assigns):
    def __init__(self):
        super().__init__()
        self.register_buffer("first", None)

    def forward(self, x):
        if self.first is None:
            self.first = x.mean(0)
        return x - self.first


class ReturnsWhatItWrites(Assigns):
    def forward(self, x):
        self.other += x.mean(0)
        self.mean = self.other
        return x + self.mean, self.other


class TwoNames(nn.Module):
    """The layers by name and once more in a list, which forward goes through twice."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.layers = nn.ModuleList([self.norm, self.linear, self.norm])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class TwoOwners(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(3))
        self.inner = nn.Module()
        self.inner.register_buffer("calls", self.count)

    def forward(self, x):
        self.count += 1
        return x * self.inner.calls


@pytest.mark.parametrize("make", [Assigns, TwoNames, TwoOwners, ReturnsWhatItWrites])
def test_outputs_and_buffers_are_torchs(make):
    torch.manual_seed(0)
    assert_three_calls_are_torchs(make())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (AssignsAnotherShape, r"makes buffer mean torch.float32 of shape \(\), it was torch.float32 of shape \(3,\)"),
        (AssignsWhatWasNone, r"makes buffer first torch.float32 of shape .*, it was None"),
    ],
)
def test_a_buffer_that_cannot_be_kept_is_refused_and_left_as_it_was(make, words):
    module = make()
    before = dict(module.named_buffers())
    with pytest.raises(UnsupportedModel, match=words):
        from_torch(module, X)
    assert dict(module.named_buffers()) == before


class Checkpointed(nn.Module):
    def __init__(self, asks: bool):
        super().__init__()
        self.fixed, self.inner, self.head = nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3), nn.Linear(3, 1)
        if asks:  # transformers' enable_input_require_grads
            self.fixed.register_forward_hook(lambda layer, inputs, output: output.requires_grad_(True))

    def forward(self, x):
        return self.head(checkpoint.checkpoint(self.inner, self.fixed(x) + 1, use_reentrant=True)).sum()


def test_a_reentrant_checkpoint_trains_its_module_where_its_input_wants_a_gradient():
    torch.manual_seed(0)
    module = Checkpointed(asks=True)
    converted = from_torch(module, X, modes=("training",))
    module.train()(X).backward()
    graph, params, rest = jax_split(converted)
    slopes = jax.grad(lambda p: graph(p, rest)(jnp.asarray(X), rngs=Rngs(jax.random.key(0))))(params)
    np.testing.assert_allclose(slopes["inner"]["weight"].get_value(), module.inner.weight.grad, atol=1e-5)


def test_a_reentrant_checkpoint_of_which_torch_has_no_gradient_is_refused():
    with pytest.raises(UnsupportedModel, match="inputs without a gradient"):
        from_torch(Checkpointed(asks=False), X, modes=("training",))


def jax_split(model):
    from flax import nnx

    definition, params, rest = nnx.split(model, nnx.Param, ...)
    return lambda p, r: nnx.merge(definition, p, r, copy=True), params, rest
