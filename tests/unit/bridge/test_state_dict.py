"""State dicts: prefixes, tied weights, one message for all that does not fit."""

import jax
import numpy as np
import pytest
import torch
from flax import nnx

from jaxtrain import nn
from torch_bridge.layouts import abstract, first_names, parameter_order
from torch_bridge.state_dict import StateDictMismatch, load_state_dict, state_dict


class Model(nnx.Module):
    """Attributes out of alphabetical order, a list, a dict, a tied weight, a buffer."""

    def __init__(self, *, rngs):
        self.word = nn.Embedding(7, 4, rngs=rngs)
        self.layers = nnx.List([nn.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.heads = nnx.Dict(small=nn.Linear(4, 2, rngs=rngs), big=nn.Linear(4, 5, rngs=rngs))
        self.norm = nn.BatchNorm(4)
        self.output = self.word

    def __call__(self, x):
        return x


class Twin(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.word = torch.nn.Embedding(7, 4)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        self.heads = torch.nn.ModuleDict({"small": torch.nn.Linear(4, 2), "big": torch.nn.Linear(4, 5)})
        self.norm = torch.nn.BatchNorm1d(4)
        self.output = self.word


def test_keys_order_shapes_and_parameter_numbers_are_torchs():
    model, twin = Model(rngs=nnx.Rngs(0)), Twin()
    state = state_dict(model)
    assert list(state) == list(twin.state_dict())
    assert [value.shape for value in state.values()] == [tuple(value.shape) for value in twin.state_dict().values()]
    assert parameter_order(model) == [name for name, _ in twin.named_parameters()]
    assert first_names(model)["output.weight"] == "word.weight"
    twin.load_state_dict({key: torch.from_numpy(np.array(value)) for key, value in state.items()}, strict=True)


def test_an_abstract_model_keeps_torchs_order():
    model = abstract(lambda: Model(rngs=nnx.Rngs(0)))
    assert parameter_order(model) == [name for name, _ in Twin().named_parameters()]


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_prefixes_of_wrapped_models_are_stripped(prefix):
    model, twin = Model(rngs=nnx.Rngs(0)), Twin()
    load_state_dict(model, {prefix + key: value for key, value in twin.state_dict().items()})
    for key, value in state_dict(model).items():
        np.testing.assert_array_equal(value, twin.state_dict()[key])


def test_a_compiled_part_is_recognised():
    twin = Twin()
    twin.layers[0] = torch.compile(twin.layers[0])
    model = Model(rngs=nnx.Rngs(0))
    load_state_dict(model, twin.state_dict())
    np.testing.assert_array_equal(model.layers[0].weight[...], twin.layers[0].weight.detach())


def test_tied_weights_may_be_given_under_one_name():
    twin, model = Twin(), Model(rngs=nnx.Rngs(0))
    state = {key: value for key, value in twin.state_dict().items() if key != "word.weight"}
    load_state_dict(model, state)
    np.testing.assert_array_equal(model.word.weight[...], twin.word.weight.detach())


def test_everything_that_does_not_fit_is_said_at_once_and_nothing_is_changed():
    model, state = Model(rngs=nnx.Rngs(0)), Twin().state_dict()
    before = state_dict(model)
    del state["layers.1.bias"]
    state["more"] = torch.ones(1)
    state["word.weight"] = torch.ones(8, 4)
    state["norm.weight"] = torch.ones(4, dtype=torch.int64)
    with pytest.raises(StateDictMismatch) as caught:
        load_state_dict(model, state)
    text = str(caught.value)
    assert "1 keys missing (layers.1.bias), 1 unexpected (more), 2 of another shape or kind" in text
    assert "word.weight is [8, 4], the model wants [7, 4]" in text
    assert "norm.weight: it holds int64, the model wants float32" in text
    jax.tree.map(np.testing.assert_array_equal, before, state_dict(model))


def test_integers_are_64_bit_in_torch_and_32_in_jax():
    model = Model(rngs=nnx.Rngs(0))
    assert state_dict(model)["norm.num_batches_tracked"].dtype == np.int64
    assert model.norm.num_batches_tracked[...].dtype == np.int32


def test_bfloat16_tensors_are_taken():
    model, state = Model(rngs=nnx.Rngs(0)), {k: v.clone() for k, v in Twin().bfloat16().state_dict().items()}
    load_state_dict(model, state)
    np.testing.assert_array_equal(model.word.weight[...], state["word.weight"].float())


def test_a_loaded_model_shares_no_memory_with_torch():
    """XLA's CPU takes aligned arrays as they are, and torch's are aligned: they must be copied."""
    twin, model = Twin(), Model(rngs=nnx.Rngs(0))
    load_state_dict(model, twin.state_dict())
    before = {key: np.array(value) for key, value in state_dict(model).items()}
    with torch.no_grad():
        for tensor in twin.state_dict().values():
            tensor.zero_()
    jax.tree.map(np.testing.assert_array_equal, before, state_dict(model))
