"""The cross-entropy: chunks, masks, packed rows."""

import math
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain import nn
from jaxtrain.systems.memory_lm import losses
from jaxtrain.systems.memory_lm.adapter import MemoryAdapter
from jaxtrain.systems.memory_lm.backbone_config import read_config
from jaxtrain.systems.memory_lm.banks import quantize_memory_for_deployment
from jaxtrain.systems.memory_lm.config import LossSection, Memory
from jaxtrain.systems.memory_lm.packing import pack
from tests.unit.memory_lm.models import CHAPTERS, ids, small, spread, strategy


def settings(model, chunk_tokens: int = 0):
    return SimpleNamespace(loss=LossSection(chunk_tokens=chunk_tokens), memory=model.memory, model=model.config)


def training_loss(model, batch):
    return jax.jit(lambda b: losses.loss(model, b, settings(model), nn.Rngs(jax.random.key(0))))(batch)


def gradients(chunk_tokens: int, vocabulary: int = 300):
    generator = np.random.default_rng(0)
    hidden = jnp.asarray(generator.normal(size=(3, 37, 16)), jnp.float32)
    weight = jnp.asarray(generator.normal(size=(vocabulary, 16)), jnp.float32)
    labels = jnp.asarray(
        np.where(generator.random((3, 37)) < 0.3, losses.IGNORE, generator.integers(0, vocabulary, (3, 37)))
    )
    total = lambda hidden, weight: losses.token_losses(hidden, weight, labels, chunk_tokens).sum()
    return jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(hidden, weight)


@pytest.mark.parametrize("vocabulary", [300, 307, 17], ids=["divisible", "a prime", "smaller than the chunks"])
@pytest.mark.parametrize("chunk_tokens", [1, 16, 64])
def test_chunked_loss_and_gradients_equal_the_plain_ones_to_1e_5(chunk_tokens, vocabulary):
    (plain, plain_grads), (chunked, chunked_grads) = gradients(0, vocabulary), gradients(chunk_tokens, vocabulary)
    assert float(chunked) == pytest.approx(float(plain), rel=1e-6)
    for a, b in zip(chunked_grads, plain_grads, strict=True):
        assert float(jnp.linalg.norm(a - b)) < 1e-5 * float(jnp.linalg.norm(b))


def test_the_chunked_loss_needs_at_most_an_eighth_of_the_plain_ones_memory():
    def temporary_bytes(chunk_tokens: int) -> int:
        total = lambda hidden, weight, labels: losses.token_losses(hidden, weight, labels, chunk_tokens).sum()
        shapes = [
            jax.ShapeDtypeStruct((4096, 64), jnp.float32),
            jax.ShapeDtypeStruct((150_000, 64), jnp.float32),
            jax.ShapeDtypeStruct((4096,), jnp.int32),
        ]
        compiled = jax.jit(jax.value_and_grad(total, argnums=(0, 1))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(128) * 8 <= temporary_bytes(0)


@pytest.mark.parametrize("spec", [(), ("data",), (None, "data")], ids=["ddp", "fsdp by rows", "fsdp by columns"])
def test_eight_devices_share_the_chunked_loss_and_none_gathers_the_weight(spec):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    place = lambda shape, dtype, *axes: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))

    def compiled(*data):
        arguments = (
            place((16, 256, 64), jnp.float32, *data),
            place((8192, 64), jnp.float32, *(spec if data else ())),
            place((16, 256), jnp.int32, *data),
        )
        total = lambda hidden, weight, labels: losses.token_losses(hidden, weight, labels, 256).sum()
        out = tuple(argument.sharding for argument in arguments[:2])
        return jax.jit(jax.grad(total, argnums=(0, 1)), out_shardings=out).lower(*arguments).compile()

    shared, alone = compiled("data"), compiled()
    assert shared.cost_analysis()["flops"] < 1.05 / 8 * alone.cost_analysis()["flops"]
    moved = re.findall(r"= f32\[([\d,]+)\]\S* (?:all-gather|all-reduce)\(", shared.as_text())
    assert moved
    assert max(math.prod(map(int, shape.split(","))) for shape in moved) == 8192 * 64 / 16


def batch_of(tokens, labels, mask=None):
    mask = jnp.ones_like(tokens) if mask is None else mask
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels, "valid": jnp.ones(len(tokens), bool)}


def test_a_batch_without_labels_has_loss_0_weight_0_and_finite_gradients():
    model = small(**strategy("sequence"))
    batch = batch_of(ids(), jnp.full((2, 10), losses.IGNORE), jnp.zeros((2, 10), jnp.int32))
    graphdef, state = nnx.split(model)

    def objective(state):
        loss = losses.loss(nnx.merge(graphdef, state), batch, settings(model), nn.Rngs(jax.random.key(0)))
        return loss.value, loss.weight

    (value, weight), grads = jax.jit(jax.value_and_grad(objective, has_aux=True))(state)
    assert (float(value), float(weight)) == (0.0, 0.0)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(grads))


def adapter() -> MemoryAdapter:
    """A small Llama that reads a routed memory, with a LoRA."""
    memory = Memory(**CHAPTERS, **strategy("token"), use_lora=True, lora_dropout=0.0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61}
    base = read_config({"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, **sizes})
    model = MemoryAdapter(base, memory, rngs=nnx.Rngs(0))
    spread(model)
    return model


@pytest.mark.parametrize("make", [lambda: small(**strategy("token")), adapter], ids=["scratch", "adapter"])
def test_padded_empty_and_unlabelled_rows_leave_the_loss_of_the_others_and_finite_gradients(make):
    model, tokens = make(), ids(4, 10)
    mask = jnp.ones((4, 10), jnp.int32).at[1, :4].set(0).at[2].set(0)  # row 1 is padded on the left, row 2 is empty
    graphdef, state = nnx.split(model)

    @jax.jit
    def gradient(state, tokens, mask):
        def objective(state):
            labels = jnp.where(mask == 1, tokens, losses.IGNORE).at[3].set(losses.IGNORE)
            batch = batch_of(tokens, labels, mask)
            loss = losses.loss(nnx.merge(graphdef, state), batch, settings(model), nn.Rngs(jax.random.key(0)))
            return loss.value, loss

        return jax.grad(objective, has_aux=True)(state)

    grads, loss = gradient(state, tokens, mask)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves((grads, loss)))
    on_the_right = tokens.at[1].set(jnp.roll(tokens[1], -4)), mask.at[1].set(jnp.roll(mask[1], -4))
    usual = gradient(state, *on_the_right)[1]
    assert float(loss.weight) == float(usual.weight) == 9 + 5
    assert float(loss.parts["ce"]) == pytest.approx(float(usual.parts["ce"]), rel=1e-5)


def test_a_quantised_bank_is_what_evaluation_sees_and_training_does_not():
    model = small(**strategy("token"))
    batch, rngs = batch_of(ids(), ids()), lambda: nn.Rngs(jax.random.key(0))
    deployed = quantize_memory_for_deployment(small(**strategy("token")), 4)
    asked = small(quantize_memory=True, memory_quant_bits=4, **strategy("token"))
    value = lambda model, rngs=None: float(losses.loss(model, batch, settings(model), rngs).value)
    assert value(asked) == value(deployed) != value(model)
    assert value(asked, rngs()) == value(model, rngs())


def test_every_choice_of_a_real_token_is_counted_and_the_entropy_is_logged_by_layer():
    model, tokens = small(**strategy("token")), ids()
    mask = jnp.ones((2, 10), jnp.int32).at[0, 7:].set(0)
    batch = batch_of(tokens, tokens, mask) | {"valid": jnp.asarray([True, False])}
    chosen = losses.histograms(model, batch, settings(model))
    assert set(chosen) == {"chapters/0", "chapters/1"}
    for indices in chosen.values():
        assert int(jnp.isfinite(indices).sum()) == 7 * 2  # real tokens of valid rows x chapters that each chose
        assert float(jnp.nanmin(indices)) >= 1  # chapter 0 is shared: read by every token, never chosen
    parts = losses.loss(model, batch, settings(model), nn.Rngs(jax.random.key(0))).parts
    by_layer = [float(parts[f"router_entropy/{layer}"]) for layer in (0, 1)]
    assert np.mean(by_layer) == pytest.approx(float(parts["router/entropy"]), rel=1e-6)


PACKED = {
    "vanilla": {"vanilla_mode": True, "use_chapters": False},
    "dense": {"use_chapters": False},
    "token": strategy("token"),
    "prefix": strategy("prefix"),
    "sequence": strategy("sequence") | {"mask_aware_pooling": True},
    "sequence-rolling": strategy("sequence-rolling")
    | {
        "mask_aware_pooling": True,
        "routing_window_size": 3,
        "normalize_shared_routed_before_mixing": True,
        "routed_scaling_factor": 2.5,
    },
    "independent": strategy("sequence") | {"mask_aware_pooling": True, "chapter_softmax": "independent"},
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_documents_have_the_loss_of_the_same_documents_alone(name):
    model = small(**PACKED[name])
    generator = np.random.default_rng(3)
    documents = [generator.integers(2, 61, length).astype(np.int32) for length in (5, 9, 3, 12, 7)]
    columns = pack([(d, d.copy()) for d in documents], 20, 0, split=False)
    packed = columns | {"valid": np.ones(len(columns["labels"]), bool)}
    tokens, labels = (np.full((5, 12), fill, np.int32) for fill in (0, losses.IGNORE))
    for row, document in enumerate(documents):
        tokens[row, : len(document)] = labels[row, : len(document)] = document
    alone = batch_of(tokens, labels, (labels != losses.IGNORE).astype(np.int32))
    together, apart = (jax.jit(lambda b: losses.loss(model, b, settings(model), None))(b) for b in (packed, alone))
    assert float(together.weight) == float(apart.weight) == sum(len(document) - 1 for document in documents)
    assert float(together.value) == pytest.approx(float(apart.value), rel=1e-5)
    if name in ("sequence", "sequence-rolling", "independent"):  # a document has one choice in both
        router = [training_loss(model, b).parts for b in (packed, alone)]
        assert float(router[0]["router/entropy"]) == pytest.approx(float(router[1]["router/entropy"]), rel=1e-5)
        assert float(router[0]["router"]) == pytest.approx(float(router[1]["router"]), rel=1e-5)


def test_a_row_that_is_not_valid_changes_neither_loss_nor_router_terms():
    model = small(**strategy("sequence"))
    tokens = ids(3)
    whole = batch_of(tokens[:2], tokens[:2])
    padded = batch_of(tokens, tokens) | {"valid": jnp.asarray([True, True, False])}
    results = [training_loss(model, b) for b in (whole, padded)]
    assert float(results[0].value) == pytest.approx(float(results[1].value), rel=1e-5)
    assert float(results[0].parts["router"]) == pytest.approx(float(results[1].parts["router"]), rel=1e-5)


def test_the_training_loss_is_the_cross_entropy_plus_the_router_terms():
    model, tokens = small(**strategy("token")), ids()
    loss = training_loss(model, batch_of(tokens, tokens))
    assert float(loss.value) == pytest.approx(float(loss.parts["ce"] + loss.parts["router"]), rel=1e-6)
    assert float(loss.parts["router"]) > 0
