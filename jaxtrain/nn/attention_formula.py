"""Attention as two products and a softmax: on every device, and what a fused kernel is tried beside."""

import jax
import jax.numpy as jnp

from jaxtrain.nn.dropout import dropout


def formula(
    q, k, v, *, mask=None, bias=None, lengths=None, causal=False, window=None, scale=None, dropout_rate=0.0, rngs=None
):
    """Compute `attention` as two products and a softmax."""
    batch, (_, queries, heads, width) = max(len(q), len(k)), q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    if kv_heads != heads:
        k, v = (jnp.repeat(x, heads // kv_heads, axis=2) for x in (k, v))
    q, k = (x.astype(jnp.promote_types(q.dtype, k.dtype)) for x in (q, k))
    q, k, v = (jnp.broadcast_to(jnp.swapaxes(x, 1, 2), (batch, heads, x.shape[1], x.shape[3])) for x in (q, k, v))
    scores = _scores(q, k).astype(jnp.promote_types(q.dtype, jnp.float32))
    scores = scores * (width**-0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    visible = _visible(mask, lengths, causal, window, queries, keys)
    if visible is not None:
        scores = jnp.where(visible, scores, -jnp.inf)
    weights = dropout(jax.nn.softmax(scores, axis=-1).astype(v.dtype), dropout_rate, rngs)
    y = jnp.swapaxes(_weighted(weights, v), 1, 2)
    return y if lengths is None else jnp.where((lengths > 0)[:, None, None, None], y, 0)


def _visible(mask, lengths, causal, window, queries: int, keys: int):
    """bool, broadcastable to [batch, head, query, key]; None where every query sees every key."""
    own = jnp.arange(queries)[:, None] + (keys - queries)  # the key at each query's place
    found = mask
    if lengths is not None:  # a sample of length 0 looks at its first key, and is 0 afterwards
        found = (jnp.arange(keys) < jnp.maximum(lengths, 1)[:, None])[:, None, None]
    if causal:
        before = jnp.arange(keys)[None, :] <= own
        found = before if found is None else found & before
    if window is not None:
        near = jnp.arange(keys)[None, :] > own - window
        found = near if found is None else found & near
    return found


# The two products of attention, heads first. XLA's CPU backend is slow at a batched product whose left side is read
# down its columns (up to six times), and that is how jax differentiates one of each; so the gradients are written here.


@jax.custom_vjp
def _scores(q, k):
    """[batch, head, query, width], [batch, head, key, width] -> [batch, head, query, key]"""
    return jnp.einsum("bhqd,bhkd->bhqk", q, k)


def _scores_backward(kept, grad):
    q, k = kept
    columns = jax.lax.platform_dependent(q, cpu=_copied_columns, default=_columns)
    return _weighted(grad, k), _columns(_weighted(columns, grad))


@jax.custom_vjp
def _weighted(weights, v):
    """[batch, head, query, key], [batch, head, key, width] -> [batch, head, query, width]"""
    return jnp.matmul(weights, v)


def _weighted_backward(kept, grad):
    weights, v = kept
    return _scores(grad, v), _columns(_weighted(_columns(grad), weights))


def _columns(x):
    return jnp.swapaxes(x, -1, -2)


def _copied_columns(x):
    """XLA would take queries that all samples share as they are, and read them down their columns."""
    return jax.lax.optimization_barrier(_columns(x))


_scores.defvjp(lambda q, k: (_scores(q, k), (q, k)), _scores_backward)
_weighted.defvjp(lambda weights, v: (_weighted(weights, v), (weights, v)), _weighted_backward)
