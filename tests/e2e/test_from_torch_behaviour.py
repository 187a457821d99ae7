"""What a converted module promises besides equal numbers: sizes, modes, ties, errors, registration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from jaxtrain.runtime.random import Rngs
from tests.e2e.models_torch_nn import MLP, Tied
from torch_bridge.from_torch import from_torch, write_back
from torch_bridge.lowering import TABLE, UnsupportedModel, register
from torch_bridge.state_dict import load_state_dict, state_dict


def _close(ours, theirs):
    np.testing.assert_allclose(np.asarray(ours), theirs.detach().numpy(), rtol=2e-5, atol=2e-6)


def test_other_batch_and_sequence_sizes_need_no_new_record():
    module = Tied().eval()
    model = from_torch(module, torch.randint(0, 10, (2, 6)), ["evaluation"])
    for shape in [(3, 5), (7, 9)]:
        tokens = torch.randint(0, 10, shape)
        _close(jax.jit(lambda x: model(x))(tokens.numpy()), module(tokens))
    assert len(model._record.graphs()) == 1


def test_a_shape_outside_the_record_is_recorded_anew():
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()).eval()
    model = from_torch(module, torch.randn(2, 1, 6, 6), ["evaluation"])
    x = torch.randn(3, 1, 9, 5)
    _close(model(x.numpy()), module(x))
    assert len(model._record.graphs()) == 2


def test_keys_and_order_are_those_of_the_torch_state_dict():
    module = MLP()
    model = from_torch(module, torch.randn(3, 6))
    assert list(state_dict(model)) == list(module.state_dict())
    load_state_dict(model, {key: value.numpy() for key, value in MLP().state_dict().items()}, strict=True)


def test_tied_parameters_are_one_and_get_the_sum_of_their_gradients():
    module = Tied().eval()
    tokens = torch.randint(0, 10, (2, 4))
    model = from_torch(module, tokens, ["evaluation"])
    assert model.head.weight is model.embed.weight
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    total = lambda params: nnx.merge(graph, params, rest)(tokens.numpy())[..., 0].sum()
    grads = jax.grad(total)(params)
    module(tokens)[..., 0].sum().backward()
    _close(grads["embed"]["weight"].get_value(), module.embed.weight.grad)


def test_training_mode_drops_with_the_key_and_evaluation_does_not():
    model = from_torch(nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5)), torch.randn(2, 4))
    x = jnp.ones((2, 4))
    run = lambda seed: np.asarray(model(x, rngs=Rngs(jax.random.key(seed))))
    np.testing.assert_array_equal(run(0), run(0))
    assert (run(0) != run(1)).any()
    assert 0.3 < (run(0) == 0).mean() < 0.7
    assert (np.asarray(model(x)) != 0).all()


def test_running_statistics_move_in_training_only():
    module = nn.BatchNorm1d(3)
    x = torch.randn(8, 3)
    model = from_torch(module, x)
    before = np.asarray(model.running_mean[...])
    model(x.numpy())
    np.testing.assert_array_equal(model.running_mean[...], before)
    model(x.numpy(), rngs=Rngs(jax.random.key(0)))
    module.train()(x)
    _close(model.running_mean[...], module.running_mean)
    _close(model.running_var[...], module.running_var)
    assert int(model.num_batches_tracked[...]) == int(module.num_batches_tracked) == 1


def test_rows_that_are_not_valid_do_not_touch_batch_statistics():
    module = nn.BatchNorm1d(3)
    x = torch.randn(5, 3)
    model = from_torch(module, x)
    padded = jnp.concatenate([x.numpy(), 100 * jnp.ones((3, 3))])
    valid = jnp.arange(8) < 5
    y = model(padded, rngs=Rngs(jax.random.key(0)), valid=valid)
    _close(y[:5], module.train()(x))
    _close(model.running_var[...], module.running_var)


class Detours(nn.Module):
    """no_grad, detach, a straight-through estimator, an in-place write through a view."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        y = self.layer(x)
        with torch.no_grad():
            scale = y.abs().sum(-1, keepdim=True)
        y = y / scale + (y.round() - y).detach()
        y[:, 0] += 2 * y[:, 1]
        return y


def test_gradients_stop_where_torch_stops_them():
    module = Detours()
    x = torch.randn(4, 3)
    model = from_torch(module, x, ["evaluation"])
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    grads = jax.grad(lambda params: jnp.sum(nnx.merge(graph, params, rest)(x.numpy()) ** 2))(params)
    (module.eval()(x) ** 2).sum().backward()
    _close(grads["layer"]["weight"].get_value(), module.layer.weight.grad)


class Branch(nn.Module):
    """Control flow that torch can record: a branch on data, a number read out of a tensor."""

    def forward(self, x):
        y = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x - 1, (x,))
        return y * x.max().item()


def test_cond_and_item_are_lowered():
    module = Branch()
    x = torch.randn(3)
    model = from_torch(module, x, ["evaluation"])
    for sign in (1.0, -1.0):
        y = x.abs() * sign
        _close(jax.jit(lambda x: model(x))(y.numpy()), module(y))


class Impossible(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(Bessel(), Bessel())

    def forward(self, x):
        x = self.inner(x)
        return x[x > 0], torch.special.airy_ai(x)


class Bessel(nn.Module):
    def forward(self, x):
        return torch.special.bessel_j0(x)


def test_one_error_lists_all_that_is_missing_with_its_lines():
    with pytest.raises(UnsupportedModel) as error:
        from_torch(Impossible(), torch.randn(3))
    what = [obstacle.what for obstacle in error.value.obstacles]
    assert len(what) == 3
    assert sum("has no lowering" in text for text in what) == 2
    assert sum("depends on the values" in text for text in what) == 1
    bessel = next(obstacle for obstacle in error.value.obstacles if "bessel" in obstacle.what)
    assert bessel.where.endswith("return torch.special.bessel_j0(x)")
    assert bessel.module == "inner.0 (Bessel) and 1 more"


class DataBranch(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            x = x + 1
        return x


def test_a_branch_on_data_names_its_line():
    with pytest.raises(UnsupportedModel, match=r"if x.sum\(\) > 0:"):
        from_torch(DataBranch(), torch.randn(3))


def test_users_register_lowerings():
    name = "aten.special_bessel_j0.default"
    register(name, lambda call, x: jnp.cos(x))
    try:
        model = from_torch(Bessel(), torch.ones(2), ["evaluation"])
        np.testing.assert_allclose(model(jnp.zeros(2)), 1)
    finally:
        del TABLE[name]


def test_register_refuses_what_is_no_name():
    with pytest.raises(ValueError, match="namespace.operator.overload"):
        register("bessel", lambda call, x: x)


def test_bfloat16_weights_compute_in_bfloat16():
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2)).eval()
    x = torch.randn(3, 8)
    model = from_torch(module, x, ["evaluation"])
    nnx.update(model, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), nnx.state(model, nnx.Param)))
    y = model(x.numpy())
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float32), module(x).detach(), atol=0.05)


def test_write_back_changes_the_same_torch_object():
    module = MLP()
    weight = module.layers[0].weight
    model = from_torch(module, torch.randn(3, 6), ["evaluation"])
    model.variables()["layers.0.weight"][...] = jnp.full((12, 6), 0.25)
    assert write_back(model, module) is module
    assert module.layers[0].weight is weight
    assert float(weight.detach().mean()) == 0.25


def test_the_module_keeps_its_modes():
    module = MLP()
    module.layers[1].eval()
    from_torch(module, torch.randn(3, 6))
    assert module.training
    assert not module.layers[1].training
