"""Attention as two products and a softmax, for every device; also the reference in the tests of fused kernels."""

import jax
import jax.numpy as jnp

from jaxtrain.nn.dropout import dropout


def formula(
    q, k, v, *, mask=None, bias=None, lengths=None, causal=False, window=None, scale=None, dropout_rate=0.0, rngs=None
):
    """Compute `jaxtrain.nn.attention` as two products and a softmax."""
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
    """Return which keys a query sees, bool, broadcastable to [batch, head, query, key]; None if all see all."""
    own = jnp.arange(queries)[:, None] + (keys - queries)  # the key at each query's position
    found = mask
    if lengths is not None:  # a sample of length 0 sees its first key here; `formula` zeroes it
        found = (jnp.arange(keys) < jnp.maximum(lengths, 1)[:, None])[:, None, None]
    if causal:
        before = jnp.arange(keys)[None, :] <= own
        found = before if found is None else found & before
    if window is not None:
        near = jnp.arange(keys)[None, :] > own - window
        found = near if found is None else found & near
    return found


# The two products of attention, heads first. XLA's CPU backend is up to six times slower for a batched product whose
# left operand is transposed, and jax's derivative of each product contains one; so the gradients are written out here.


@jax.custom_vjp
def _scores(q, k):
    """Multiply q [batch, head, query, width] by k [batch, head, key, width] to scores [batch, head, query, key]."""
    return jnp.einsum("bhqd,bhkd->bhqk", q, k)


def _scores_backward(kept, grad):
    q, k = kept
    columns = jax.lax.platform_dependent(q, cpu=_copied_columns, default=_columns)
    return _weighted(grad, k), _columns(_weighted(columns, grad))


@jax.custom_vjp
def _weighted(weights, v):
    """Multiply weights [batch, head, query, key] by v [batch, head, key, width] to [batch, head, query, width]."""
    return jnp.matmul(weights, v)


def _weighted_backward(kept, grad):
    weights, v = kept
    return _scores(grad, v), _columns(_weighted(_columns(grad), weights))


def _columns(x):
    return jnp.swapaxes(x, -1, -2)


def _copied_columns(x):
    """Transpose into a copy: without it, XLA reads queries that all samples share by columns, which is slow."""
    return jax.lax.optimization_barrier(_columns(x))


_scores.defvjp(lambda q, k: (_scores(q, k), (q, k)), _scores_backward)
_weighted.defvjp(lambda weights, v: (_weighted(weights, v), (weights, v)), _weighted_backward)
