"""What a user of from_torch meets: errors, own lowerings, free sizes, ties, running statistics, recomputed blocks."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import library, nn

from jaxtrain.nn.remat import rematerialise
from jaxtrain.runtime.prng import Rngs
from torch_bridge.datasets import to_numpy
from torch_bridge.from_torch import from_torch, write_back
from torch_bridge.lowering import TABLE, UnsupportedModel, register
from torch_bridge.state_dict import load_state_dict, state_dict


def close(ours, theirs, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(ours), theirs.detach().numpy(), rtol=tolerance, atol=tolerance)


def operator(name: str, factor: float):
    """An operator of a user's own, which no table can have."""
    made = library.custom_op(f"own::{name}", lambda x: x * factor, mutates_args=(), schema="(Tensor x) -> Tensor")
    made.register_fake(torch.empty_like)
    return made


doubled, halved = operator("doubled", 2.0), operator("halved", 0.5)


class Lacks(nn.Module):
    """Two operators that the table has not."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([Special(), Special()])

    def forward(self, x):
        return doubled(x) + sum(inner(x) for inner in self.inner)


class Special(nn.Module):
    def forward(self, x):
        return halved(x)


def test_one_error_lists_every_missing_operator_with_its_line_and_module():
    with pytest.raises(UnsupportedModel) as caught:
        from_torch(Lacks(), torch.ones(3))
    text = str(caught.value)
    assert "Lacks cannot be converted to JAX, for 2 reasons" in text
    assert "own.doubled.default has no lowering" in text
    assert "own.halved.default has no lowering" in text
    assert "return doubled(x) + sum(inner(x) for inner in self.inner)" in text
    assert "inner.0 (Special) and 1 more" in text
    assert f"{__file__}:" in text
    assert "torch_bridge.lowering.register" in text


class Branches(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_a_branch_on_data_names_its_line_and_the_ways_out():
    with pytest.raises(UnsupportedModel, match=r"return x if x\.sum\(\) > 0 else -x[\s\S]*torch\.where"):
        from_torch(Branches(), torch.ones(3))


class AsksNumpy(nn.Module):
    def __init__(self, ask):
        super().__init__()
        self.ask = ask

    def forward(self, x):
        return x + self.ask(x * 2)


@pytest.mark.parametrize("ask", [
    lambda x: torch.from_numpy(x.detach().numpy()), lambda x: torch.tensor(np.asarray(x)),
    lambda x: torch.as_tensor(np.cumsum(x.cpu().numpy())),
])  # fmt: skip
def test_numpy_on_a_tensor_is_converted(ask):
    x = torch.rand(3)
    np.testing.assert_allclose(from_torch(AsksNumpy(ask), x)(x.numpy()), x + ask(x * 2), rtol=1e-6)


def test_a_users_lowering_is_used():
    name = "own.doubled.default"
    assert name not in TABLE
    register(name, lambda call, x: 2 * x)

    class Doubles(nn.Module):
        def forward(self, x):
            return doubled(x)

    try:
        x = torch.linspace(0.1, 5, 7)
        close(from_torch(Doubles(), x, ["evaluation"])(to_numpy(x)), 2 * x)
    finally:
        del TABLE[name]


def test_other_batch_and_sequence_sizes_need_one_more_graph():
    torch.manual_seed(0)
    module = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    model = from_torch(module, torch.randn(2, 5, 8), ["evaluation"])
    for shape in ((2, 5, 8), (7, 3, 8), (3, 11, 8)):
        x = torch.randn(shape)
        close(jax.jit(lambda x: model(x))(to_numpy(x)), module(x))
    assert len(model._record.graphs()) == 2


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.output = nn.Linear(4, 7, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, ids):
        return self.output(self.embedding(ids))


def test_sizes_that_python_needs_as_plain_numbers_are_recorded_once_for_each():
    class Table(nn.Module):
        def forward(self, x):
            parts = {(0, i): x[:, i] * i for i in range(x.size(1))}
            return parts[0, x.size(1) - 1]

    converted = from_torch(Table(), torch.randn(2, 5))
    close(converted(np.ones((2, 5), np.float32)), torch.full((2,), 4.0))
    close(converted(np.ones((3, 7), np.float32)), torch.full((3,), 6.0))


def test_tied_parameters_are_one_variable_with_both_gradients():
    module, ids = Tied(), torch.tensor([[1, 2], [3, 3]])
    model = from_torch(module, ids, ["evaluation"])
    variables = model.variables()
    assert variables["embedding.weight"] is variables["output.weight"]
    module(ids).square().sum().backward()
    graph, params = nnx.split(model, nnx.Param)
    grads = jax.grad(lambda params: jnp.square(nnx.merge(graph, params)(to_numpy(ids))).sum())(params)
    assert len(jax.tree.leaves(grads)) == 1
    close(jax.tree.leaves(grads)[0], module.embedding.weight.grad)
    assert list(state_dict(model)) == list(module.state_dict())


def test_batch_statistics_move_in_training_only_as_torchs():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3))
    x = torch.randn(4, 1, 6, 6)
    model = from_torch(copy.deepcopy(module), x)
    for _ in range(2):
        close(model(to_numpy(x), rngs=Rngs(jax.random.key(0))), module(x))
    for key, value in module.state_dict().items():
        close(state_dict(model)[key], value)
    assert int(module[1].num_batches_tracked) == int(state_dict(model)["1.num_batches_tracked"]) == 2
    before = state_dict(model)
    close(model(to_numpy(x)), module.eval()(x))
    jax.tree.map(np.testing.assert_array_equal, before, state_dict(model))


def test_rows_that_only_fill_up_a_batch_do_not_enter_its_statistics():
    module = nn.BatchNorm1d(3)
    x = torch.randn(6, 3)
    model = from_torch(copy.deepcopy(module), x, ["training"])
    filled = np.concatenate([to_numpy(x), np.full((2, 3), 100, np.float32)])
    ours = model(filled, rngs=Rngs(jax.random.key(0)), valid=jnp.arange(8) < 6)
    close(ours[:6], module(x))
    close(state_dict(model)["running_var"], module.running_var)


def test_a_converted_model_shares_no_memory_with_the_module_and_goes_back_into_it():
    module = nn.Linear(64, 64)
    model, before = from_torch(module, torch.randn(2, 64), ["evaluation"]), module.weight.detach().clone()
    weight = module.weight
    with torch.no_grad():
        weight.zero_()
    np.testing.assert_array_equal(model.weight[...], before)
    assert write_back(model, module).weight is weight
    assert torch.equal(weight, before)
    load_state_dict(model, nn.Linear(64, 64).state_dict())
    assert torch.equal(weight, before)


def test_double_precision_that_the_run_left_alone_comes_back_as_it_was():
    module = nn.Linear(2, 1)
    module.register_buffer("third", torch.tensor([1 / 3, torch.nan], dtype=torch.float64))
    write_back(from_torch(module, torch.zeros(1, 2)), module)
    assert module.third[0].item() == 1 / 3


@functools.cache
def encoder():
    torch.manual_seed(0)
    module = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True), 2)
    return from_torch(module, torch.randn(2, 5, 8), ["training"])


def gradients(policy: str):
    graph, params = nnx.split(encoder(), nnx.Param)
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)

    def loss(params):
        with rematerialise(policy, {}, None) as scope:
            value = jnp.square(nnx.merge(graph, params)(x, rngs=Rngs(jax.random.key(1)))).sum()
        loss.blocks = scope.blocks
        return value

    program = str(jax.make_jaxpr(jax.grad(loss))(params))
    return jax.jit(jax.grad(loss))(params), loss.blocks, program.count("remat2[")


def test_the_blocks_of_a_converted_model_are_recomputed_with_the_same_dropout():
    plain, none, kept = gradients("none")
    again, count, recomputed = gradients("full")
    assert (none, kept) == (0, 0)
    assert count == recomputed == 2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), plain, again)
