"""Derivatives that are written by hand, beside those of the plain formulas, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxtrain import nn

SHAPES = {"self": (5, 5), "few queries": (2, 7), "many queries": (7, 2)}


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def drawn(*shape, dtype=np.float64):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), dtype)


def plain_attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)


def plain_norm(x, eps, centred):
    x = x - x.mean(-1, keepdims=True) * centred
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + eps)


@pytest.mark.parametrize("batches", [(2, 2), (1, 2), (2, 1)])
@pytest.mark.parametrize(("queries", "keys"), SHAPES.values(), ids=SHAPES)
def test_attention_has_the_gradients_of_its_formula(queries, keys, batches):
    (few, many), grad = batches, drawn(2, queries, 3, 4)
    q, k, v = drawn(few, queries, 3, 4), drawn(many, keys, 3, 4), drawn(many, keys, 3, 4) + 1
    wanted, got = (jax.vjp(function, q, k, v) for function in (plain_attention, nn.attention))
    np.testing.assert_allclose(got[0], wanted[0], atol=1e-14)
    for ours, theirs in zip(got[1](grad), wanted[1](grad), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-14)


def test_attention_takes_keys_of_another_dtype():
    q, k = drawn(1, 3, 2, 4, dtype=np.float32), drawn(1, 4, 2, 4, dtype=jnp.bfloat16)
    grads = jax.grad(lambda *given: nn.attention(*given).astype(jnp.float32).sum(), argnums=(0, 1, 2))(q, k, k)
    assert [grad.dtype for grad in grads] == [jnp.float32, jnp.bfloat16, jnp.bfloat16]


def test_attention_can_be_differentiated_twice():
    check_grads(nn.attention, (drawn(1, 3, 2, 4), drawn(1, 4, 2, 4), drawn(1, 4, 2, 4)), order=2, modes=["rev"])


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, lambda width, eps: nn.GroupNorm(1, width, eps)])
@pytest.mark.parametrize("eps", [1e-5, 0.5])  # large: its share in the derivative shows
def test_norms_have_the_derivatives_of_their_formulas(norm, eps):
    layer = norm(6, eps=eps)
    x, grad = drawn(3, 6), drawn(3, 6) + 0.3
    wanted = jax.vjp(lambda x: plain_norm(x, eps, norm is not nn.RMSNorm), x)
    got = jax.vjp(layer, x)
    np.testing.assert_allclose(got[0], wanted[0], atol=1e-14)
    np.testing.assert_allclose(got[1](grad)[0], wanted[1](grad)[0], atol=1e-13)
    check_grads(layer, (x,), order=2, modes=["fwd", "rev"])


def test_gelu_in_half_precision_is_computed_in_float32():
    x = jnp.linspace(-6, 6, 1001, dtype=jnp.float32).astype(jnp.bfloat16)
    exact = nn.gelu(x.astype(jnp.float64))
    assert nn.gelu(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(nn.gelu(x), nn.gelu(x.astype(jnp.float32)).astype(jnp.bfloat16))
    np.testing.assert_allclose(nn.gelu(x).astype(jnp.float64), exact, rtol=2**-8, atol=1e-6)
