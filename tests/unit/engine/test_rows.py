"""Look-ups whose gradients a GPU adds in a fixed order: the same sums as jax's scatter, whichever way they are made."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import nn

rows = importlib.import_module("jaxtrain.nn.rows")
TABLE = 11


def lookups(shape=(6, 5), width=8):
    rng = np.random.default_rng(0)
    indices = jnp.asarray(rng.integers(-3, TABLE + 2, shape), jnp.int32)  # some outside, some counted from the end
    return indices, jnp.asarray(rng.normal(size=(*shape, width)), jnp.float32)


@pytest.mark.parametrize("limit", [0, 1e12], ids=["sorted", "product"])
def test_sums_of_rows_are_those_of_the_scatter(monkeypatch, limit):
    monkeypatch.setattr(rows, "PRODUCT_LIMIT", limit)
    indices, grad = lookups()
    like = jax.ShapeDtypeStruct((TABLE, 8), jnp.float32)
    wanted = jax.linear_transpose(lambda table: jnp.take(table, indices, axis=0), like)(grad)[0]
    got = rows.row_sums(indices, grad, like)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_sums_of_bfloat16_rows_are_rounded_once(monkeypatch):
    monkeypatch.setattr(rows, "PRODUCT_LIMIT", 0)
    grad = jnp.ones((300, 2), jnp.bfloat16)  # 1 + 1 + ... in bfloat16 ends at 256
    like = jax.ShapeDtypeStruct((3, 2), jnp.bfloat16)
    assert rows.row_sums(jnp.ones(300, jnp.int32), grad, like)[1].tolist() == [300, 300]


def test_the_gradient_of_tokens_is_the_product_with_zeros_and_ones():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 7, 3)), jnp.float32)
    indices = jnp.asarray([[1, 1, 6], [0, 2, 2]])
    value, pull = jax.vjp(lambda x: nn.tokens(x, indices), x)
    np.testing.assert_array_equal(value, jnp.take_along_axis(x, indices[..., None], axis=1))
    hot = (indices[..., None] == jnp.arange(7)).astype(jnp.float32)
    np.testing.assert_allclose(pull(value)[0], jnp.einsum("bnt,bnd->btd", hot, value), rtol=1e-6)


def test_a_picked_value_is_the_one_that_is_looked_up():
    values = jnp.asarray(np.random.default_rng(2).normal(size=(4, 9)), jnp.float32).at[0, 3].set(-jnp.inf)
    index = jnp.asarray([1, 8, 0, 3])
    np.testing.assert_array_equal(nn.pick(values, index), jnp.take_along_axis(values, index[:, None], 1)[:, 0])
    assert nn.pick(values, jnp.full(4, -100)).tolist() == [0, 0, 0, 0]


def test_devices_that_share_a_row_add_up_their_own_tokens(monkeypatch):
    from jax.sharding import Mesh

    from jaxtrain.runtime.spread import spread

    monkeypatch.setattr(rows, "PRODUCT_LIMIT", 0)
    indices, grad = lookups((4, 6))
    like = jax.ShapeDtypeStruct((TABLE, 8), jnp.float32)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "sequence"))
    with spread(mesh, ("data",), (), ("sequence",)):
        compiled = jax.jit(lambda i, g: rows.row_sums(i, g, like)).lower(indices, grad).compile()
    np.testing.assert_allclose(compiled(indices, grad), rows.row_sums(indices, grad, like), rtol=1e-5, atol=1e-6)
    assert "all-gather" not in compiled.as_text()


def test_devices_add_up_their_own_rows(monkeypatch):
    """Each its part, sorted by itself, then one sum: the program holds no gather of the batch."""
    from jax.sharding import Mesh

    from jaxtrain.runtime.spread import spread

    if len(jax.devices()) < 2:
        pytest.skip("one device")
    monkeypatch.setattr(rows, "PRODUCT_LIMIT", 0)
    indices, grad = lookups((2, 5))
    like = jax.ShapeDtypeStruct((TABLE, 8), jnp.float32)
    with spread(Mesh(np.array(jax.devices()[:2]), ("data",)), ("data",)):
        apart = jax.jit(lambda i, g: rows.row_sums(i, g, like))(indices, grad)
    np.testing.assert_allclose(apart, rows.row_sums(indices, grad, like), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("limit", [0, 1e12], ids=["sorted", "product"])
def test_a_clipped_look_up_gives_its_last_row_what_lies_beyond(monkeypatch, limit):
    monkeypatch.setattr(rows, "PRODUCT_LIMIT", limit)
    indices, grad = lookups()
    table = jnp.asarray(np.random.default_rng(1).normal(size=(TABLE, 8)), jnp.float32)
    wanted, theirs = jax.vjp(lambda table: jnp.take(table, indices, axis=0, mode="clip"), table)
    got, ours = jax.vjp(lambda table: nn.rows(table, indices, "clip"), table)
    np.testing.assert_array_equal(got, wanted)
    np.testing.assert_allclose(ours(grad)[0], theirs(grad)[0], rtol=1e-6)
    clipped = jnp.clip(indices, 0, TABLE - 1)
    np.testing.assert_allclose(rows.row_sums(clipped, grad, table), theirs(grad)[0], rtol=1e-5, atol=1e-6)
