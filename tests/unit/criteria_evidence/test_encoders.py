"""Every encoder against transformers' own, with random weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jaxtrain.systems.criteria_evidence import torch_encoders
from jaxtrain.systems.criteria_evidence.deberta import relative_rows
from jaxtrain.systems.criteria_evidence.encoder_config import PRESETS, Encoder, from_hf, to_hf, with_defaults
from jaxtrain.systems.criteria_evidence.encoders import build_encoder
from tests.unit.criteria_evidence.judge import KINDS, encoder, hf_model, texts, transformers
from torch_bridge.layouts import abstract, named_variables, parameter_order
from torch_bridge.state_dict import load_state_dict, state_dict


def ours(config: Encoder, state: dict) -> nnx.Module:
    model = build_encoder(config.model_copy(update={"hidden_dropout_prob": 0.0}), rngs=nnx.Rngs(0))
    load_state_dict(model, {key: value.numpy() for key, value in state.items()}, strict=True)
    return model


@pytest.mark.parametrize("name", KINDS)
def test_hidden_states_are_transformers_own(name):
    config = encoder(name)
    judge, given = hf_model(config), texts(config)
    with torch.no_grad():
        want = judge(**{key: torch.from_numpy(value) for key, value in given.items()})
    got = jax.jit(lambda model, batch: model(**batch))(ours(config, judge.state_dict()), given)
    np.testing.assert_allclose(got.hidden, want.last_hidden_state.numpy(), atol=1e-5)
    if config.has_pooler:
        np.testing.assert_allclose(got.pooled, want.pooler_output.numpy(), atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_an_exported_encoder_loads_strictly_into_transformers_and_the_twin(name):
    config = encoder(name)
    model = build_encoder(config, rngs=nnx.Rngs(1))
    exported = {key: torch.from_numpy(np.array(value)) for key, value in state_dict(model).items()}
    judge = hf_model(config)
    judge.load_state_dict(exported, strict=True)
    twin = torch_encoders.Encoder(config).eval()
    twin.load_state_dict(exported, strict=True)
    given = {key: torch.from_numpy(value) for key, value in texts(config).items()}
    with torch.no_grad():
        want = judge.eval()(**given).last_hidden_state.numpy()
        again = twin(given["input_ids"], given["attention_mask"], given["token_type_ids"])[0].numpy()
    got = np.asarray(model(**texts(config)).hidden)
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_allclose(again, want, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_parameters_are_numbered_as_torch_numbers_them(name):
    config = encoder(name)
    model = abstract(lambda: build_encoder(config, rngs=nnx.Rngs(0)))
    assert parameter_order(model) == [key for key, _ in hf_model(config).named_parameters()]


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_a_text_without_visible_tokens_is_finite_and_transformers_own(name):
    config = encoder(name)
    judge, given = hf_model(config), texts(config)
    given["attention_mask"][1] = 0
    with torch.no_grad():
        want = judge(**{key: torch.from_numpy(value) for key, value in given.items()}).last_hidden_state.numpy()
    np.testing.assert_allclose(ours(config, judge.state_dict())(**given).hidden, want, atol=1e-5)


def test_relative_rows_of_deberta_v3_base_are_transformers_own():
    package = transformers()
    module = package.models.deberta_v2.modeling_deberta_v2
    config = Encoder(**with_defaults(PRESETS["microsoft/deberta-v3-base"]))
    tokens = torch.zeros(1, 1, 512, 4)
    want = module.build_relative_position(tokens, tokens, bucket_size=256, max_position=512)[0] + 256
    np.testing.assert_array_equal(relative_rows(512, config), want.clamp(0, 511).numpy())


@pytest.mark.parametrize(
    ("name", "count"),
    [("bert-base-uncased", 109_482_240), ("roberta-base", 124_645_632), ("microsoft/deberta-v3-base", 183_831_552)],
)
def test_a_preset_has_the_published_number_of_parameters(name, count):
    model = nnx.eval_shape(lambda: build_encoder(Encoder(**with_defaults(PRESETS[name])), rngs=nnx.Rngs(0)))
    assert sum(variable.size for _, variable in named_variables(model)) == count


@pytest.mark.parametrize("name", KINDS)
def test_a_config_json_and_back_gives_the_same_encoder(name):
    config = encoder(name)
    again = Encoder(**from_hf(transformers().AutoConfig.for_model(**to_hf(config)).to_dict()))
    assert again.model_dump(exclude={"model_type"}) == config.model_dump(exclude={"model_type"})


def test_fresh_weights_have_transformers_spread():
    config = encoder("bert").model_copy(update={"vocab_size": 2000, "initializer_range": 0.05})
    state = state_dict(build_encoder(config, rngs=nnx.Rngs(0)))
    table = state["embeddings.word_embeddings.weight"]
    assert table[1:].std() == pytest.approx(0.05, rel=0.05)
    assert np.all(table[0] == 0)
    assert np.all(state["pooler.dense.bias"] == 0)


def test_padding_rows_get_no_gradient():
    config = encoder("roberta")
    model = build_encoder(config.model_copy(update={"hidden_dropout_prob": 0.0}), rngs=nnx.Rngs(0))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    given = texts(config)
    loss = lambda p: jnp.square(nnx.merge(graphdef, p, rest)(**given).hidden).sum()
    grads = jax.jit(jax.grad(loss))(params)["embeddings"]
    for name in ("word_embeddings", "position_embeddings"):
        assert np.all(grads[name]["weight"][...][config.pad_token_id] == 0)
        assert np.any(grads[name]["weight"][...][config.pad_token_id + 1] != 0)
