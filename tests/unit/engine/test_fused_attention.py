"""When attention goes to the device's fused kernel, and that it is the same attention. The kernel itself needs a GPU;
here jax's plain formula stands for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import nn
from jaxtrain.nn import fused_attention

BATCH, TOKENS, HEADS, WIDTH = 2, 64, 4, 16


@pytest.fixture
def calls(monkeypatch):
    """How often the kernel was called."""
    made = []

    def kernel(*arguments, **options):
        made.append(options)
        return jax.nn.dot_product_attention(*arguments, **options, implementation="xla")

    monkeypatch.setattr(fused_attention, "is_available", lambda: True)
    monkeypatch.setattr(fused_attention, "_kernel", kernel)
    return made


def inputs(keys=TOKENS, queries=None, kv_heads=HEADS, width=WIDTH, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    draw = lambda tokens, heads: jnp.asarray(rng.normal(size=(BATCH, tokens, heads, width)), dtype)
    return draw(queries or keys, HEADS), draw(keys, kv_heads), draw(keys, kv_heads)


def padding():
    """The second sample's last 20 keys are padding."""
    return np.arange(TOKENS)[None, None, None] < np.asarray([TOKENS, TOKENS - 20])[:, None, None, None]


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"mask": padding()}, {"mask": padding(), "causal": True}, {"scale": 0.3}, {"kv_heads": 2}],
    ids=lambda options: "-".join(options) or "plain",
)
def test_the_kernels_attention_and_gradients_are_the_formulas_in_bf16(calls, options):
    options = dict(options)
    q, k, v = inputs(kv_heads=options.pop("kv_heads", HEADS))

    def run(*arrays):
        return jnp.sum(jnp.square(nn.attention(*arrays, **options).astype(jnp.float32)))

    ours = jax.value_and_grad(run, (0, 1, 2))(q, k, v)
    assert len(calls) == 1
    formula = jax.value_and_grad(run, (0, 1, 2))(*(x.astype(jnp.float32) for x in (q, k, v)))
    assert len(calls) == 1
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(formula), strict=True):
        one, other = np.asarray(one, np.float32), np.asarray(other)
        assert np.linalg.norm(one - other) < 2e-2 * np.linalg.norm(other)


def test_a_query_that_sees_nothing_gives_zero(calls):
    mask = padding()
    mask[0] = False
    y = nn.attention(*inputs(), mask=mask)
    assert len(calls) == 1
    assert not y[0].any()
    assert jnp.isfinite(y).all()


def test_a_query_before_the_first_token_of_a_left_padded_text_gives_zero(calls):
    y = nn.attention(*inputs(), mask=padding()[..., ::-1], causal=True)
    assert len(calls) == 1
    assert not y[1, :20].any()
    assert y[1, 20:].any(axis=(1, 2)).all()


@pytest.mark.parametrize(
    ("arrays", "options"),
    [
        ({"dtype": jnp.float32}, {}),
        ({"keys": 32}, {}),
        ({"width": 12}, {}),
        ({"keys": 65}, {"mask": np.ones((1, 1, 65, 65), bool)}),
        ({"queries": 128}, {"causal": True}),
        ({}, {"bias": np.zeros((1, HEADS, TOKENS, TOKENS))}),
        ({}, {"dropout_rate": 0.1}),
    ],
    ids=["float32", "few_tokens", "width_12", "odd_under_a_mask", "other_lengths_causal", "bias", "dropout"],
)
def test_what_the_kernel_does_not_do_is_left_to_the_formula(calls, arrays, options):
    nn.attention(*inputs(**arrays), **options, rngs=nn.Rngs(jax.random.key(0)))
    assert calls == []


def test_without_a_gpu_there_is_no_kernel():
    assert fused_attention.is_available() is False
