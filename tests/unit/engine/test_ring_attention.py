"""Attention of tokens that lie on several devices equals that of one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxtrain import nn
from jaxtrain.errors import UserError
from jaxtrain.nn import attention_blocks
from jaxtrain.runtime.spread import spread


def on(rows: int, devices: int, heads: int = 1):
    """The scope of a mesh: rows x devices of a row's tokens x heads."""
    grid = np.array(jax.devices()[: rows * devices * heads]).reshape(rows, devices, heads)
    return spread(Mesh(grid, ("data", "sequence", "tensor")), ("data",), ("tensor",), ("sequence",))


def arrays(batch=2, tokens=24, heads=4, kv_heads=2, width=8):
    drawn = jax.random.split(jax.random.key(0), 4)
    shapes = [(batch, tokens, n, width) for n in (heads, kv_heads, kv_heads, heads)]
    return [jax.random.normal(key, shape) for key, shape in zip(drawn, shapes, strict=True)]


def everything(q, k, v, grad, **options):
    """The result and the gradients of q, k and v."""
    value, pull = jax.vjp(lambda *given: nn.attention(*given, causal=True, **options), q, k, v)
    return value, *pull(grad)


def furthest(found, wanted) -> float:
    far = lambda x, y: float(jnp.linalg.norm((x - y).ravel()) / jnp.linalg.norm(y.ravel()))
    return max(far(x, y) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("mesh", "lengths"),
    [((1, 2), None), ((1, 3), None), ((2, 4), None), ((2, 2, 2), None), ((2, 4), [24, 7]), ((1, 4), [0, 13])],
    ids=str,
)
def test_tokens_on_several_devices_attend_as_on_one(mesh, lengths):
    given = arrays()
    options = {} if lengths is None else {"lengths": jnp.asarray(lengths)}
    wanted = everything(*given, **options)
    with on(*mesh):
        found = jax.jit(functools.partial(everything, **options))(*given)
    assert furthest(found, wanted) < 1e-6


def test_a_ring_sends_keys_and_gathers_nothing():
    with on(1, 8):
        text = jax.jit(everything).lower(*arrays(tokens=32)).compile().as_text()
    assert "collective-permute" in text
    assert "all-to-all" not in text


def test_queries_go_by_in_pieces_where_their_scores_are_many(monkeypatch):
    given = arrays()
    wanted = everything(*given)
    monkeypatch.setattr(attention_blocks, "MOST_SCORES", 24 * 4 * 2)
    with on(1, 2):
        assert furthest(jax.jit(everything)(*given), wanted) < 1e-6


def test_a_block_in_bfloat16_is_within_the_trial_of_the_kernel():
    assert 1e-4 < attention_blocks.difference(fused=False) < 2e-2


@pytest.mark.parametrize("options", [{"mask": jnp.ones((1, 1, 24, 24), bool)}, {"window": 4}], ids=["mask", "window"])
def test_what_a_ring_does_not_do_is_refused(options):
    with on(1, 2), pytest.raises(UserError, match=f"shard.sequence: causal attention with {next(iter(options))}"):
        everything(*arrays(), **options)


def test_tokens_that_do_not_divide_are_refused_with_the_next_multiple():
    with on(1, 8), pytest.raises(UserError, match="24 is not a multiple of 16, .* the next multiple is 32"):
        everything(*arrays())
