"""register_full_backward_hook and register_full_backward_pre_hook change gradients as in torch, or are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from torch_bridge.datasets import to_numpy
from torch_bridge.from_torch import from_torch
from torch_bridge.lowering import UnsupportedModel

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 1, 9, 9, generator=torch.Generator().manual_seed(1))


class Both(nn.Module):
    def forward(self, a, b):
        return a * b, a + b


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.act, self.both = nn.Tanh(), Both()

    def forward(self, x):
        h = self.act(self.a(x))
        product, total = self.both(h, self.b(h))
        return self.c(product + total.sin())


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.last = nn.Conv2d(1, 3, 3, stride=2), nn.ReLU(), nn.Conv2d(3, 2, 2)

    def forward(self, x):
        return self.last(self.act(self.first(x)))


def _theirs(model, x):
    y = model(x)
    (y * (torch.arange(y.numel()) + 1).reshape(y.shape)).sum().backward()
    return {name: np.zeros(p.shape) if p.grad is None else p.grad.numpy() for name, p in model.named_parameters()}


def _ours(model, x):
    graph, params, rest = nnx.split(from_torch(model, x, ["evaluation"]), nnx.Param, ...)

    def loss(params):
        y = nnx.merge(graph, params, rest)(to_numpy(x))
        return (y * (jnp.arange(y.size) + 1).reshape(y.shape)).sum()

    return {".".join(map(str, path)): value[...] for path, value in nnx.to_flat_state(jax.grad(loss)(params))}


def _clamped(module, into, out):
    return tuple(None if slope is None else slope.clamp(-0.1, 0.1) for slope in into)


def _doubled(module, into, out):
    return tuple(slope * 2 for slope in into)


def _only_where_there_is_one(module, into, out):
    return None if into[0] is None else (into[0].clamp(-0.1, 0.1),)


def _one(model):
    model.b.register_full_backward_hook(_clamped)


def _every_layer(model):
    for layer in model.children():
        layer.register_full_backward_hook(_clamped)


def _first_layer_too(model):
    for layer in (model.a, model.b):
        layer.register_full_backward_hook(_only_where_there_is_one)


def _two(model):
    model.b.register_full_backward_hook(_doubled)
    model.b.register_full_backward_hook(_clamped)


def _before(model):
    model.c.register_full_backward_pre_hook(lambda module, out: (out[0].clamp(-3, 3),))


def _before_and_after(model):
    model.b.register_full_backward_pre_hook(lambda module, out: (out[0] * 3,))
    model.b.register_full_backward_hook(lambda module, into, out: (into[0] + out[0].sum() * 0.01,))


def _swapped_outputs(model):
    model.both.register_full_backward_pre_hook(lambda module, out: (out[1], out[0]))


def _mixed_inputs(model):
    model.both.register_full_backward_hook(lambda module, into, out: (into[0] + out[0], into[1] * out[1].mean()))


def _one_input_without(model):
    model.both.register_full_backward_hook(lambda module, into, out: (None, into[1]))


def _weight(model):
    model.b.register_full_backward_hook(lambda module, into, out: (out[0] @ module.weight.detach() * 2,))


def _kept_output(model):
    model.act.register_forward_hook(lambda module, inputs, output: setattr(module, "kept", output.detach()))
    model.act.register_full_backward_hook(lambda module, into, out: (into[0] * (module.kept > 0),))


def _with_parameter(model):
    model.b.weight.register_hook(lambda slope: slope.clamp(-0.1, 0.1))
    model.b.register_full_backward_hook(_doubled)


def _whole(model):
    model.register_full_backward_pre_hook(lambda module, out: (out[0] * 2,))


PREPARED = [
    _one,
    _every_layer,
    _first_layer_too,
    _two,
    _before,
    _before_and_after,
    _swapped_outputs,
    _mixed_inputs,
    _one_input_without,
    _weight,
    _with_parameter,
    _whole,
]


def _prepared(kind, prepare):
    model = kind()
    prepare(model)
    return model


@pytest.mark.parametrize("prepare", PREPARED, ids=lambda prepare: prepare.__name__.strip("_"))
def test_the_gradient_is_torchs(prepare):
    theirs, ours = _theirs(_prepared(Net, prepare), X), _ours(_prepared(Net, prepare), X)
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-4)


def test_hooks_of_convolutions_know_the_size_of_what_they_give():
    prepare = lambda model: model.act.register_full_backward_hook(lambda m, into, out: (into[0] * (out[0] > 0),))
    theirs, ours = _theirs(_prepared(ConvNet, prepare), IMAGES), _ours(_prepared(ConvNet, prepare), IMAGES)
    np.testing.assert_allclose(ours["first.weight"], theirs["first.weight"], rtol=1e-4, atol=1e-4)


def test_a_batch_of_another_size_goes_through_the_same_record():
    model = from_torch(_prepared(Net, _before_and_after), X, ["evaluation"])
    model(to_numpy(torch.cat([X, X])))
    assert len(model._record.graphs()) == 1


def _nothing(model):
    model.b.register_full_backward_hook(lambda module, into, out: None)


def _gradient_without_an_input(model):
    model.a.register_full_backward_hook(lambda module, into, out: (out[0],))


def _old_kind(model):
    model.b.register_backward_hook(lambda module, into, out: None)


REFUSED = [
    (_nothing, "returns nothing"),
    (_gradient_without_an_input, "no input requires gradient"),
    (_kept_output, "which its backward hooks may read"),
    (_old_kind, "register_backward_hook"),
]


@pytest.mark.parametrize(("prepare", "sentence"), REFUSED, ids=[case[0].__name__.strip("_") for case in REFUSED])
def test_a_hook_without_a_form_in_jax_is_refused(prepare, sentence):
    with pytest.raises(UnsupportedModel, match=sentence):
        from_torch(_prepared(Net, prepare), X, ["evaluation"])
