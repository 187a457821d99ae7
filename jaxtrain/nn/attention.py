"""Scaled dot-product attention and torch's MultiheadAttention."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.nn import fused_attention, initializers
from jaxtrain.nn.dropout import dropout
from jaxtrain.nn.linear import Linear, linear


def attention(q, k, v, *, mask=None, bias=None, causal=False, scale=None, dropout_rate=0.0, rngs=None):
    """softmax(q k^T scale + bias) v, heads apart, in float32 inside the softmax.

    q: [batch or 1, query, head, width]; k, v: [batch or 1, key, kv_head, width], kv_head dividing head (query head i
    reads kv head i // (head / kv_head)). mask: bool, broadcastable to [batch, head, query, key], True = may attend; a
    row that may attend to nothing gives NaN, as in torch. bias: added to the scores, same shape. causal: the last query
    sees the last key. Gives [batch, query, head, width]. On a GPU cuDNN's kernel does what it takes, without bias and
    dropout (`fused_attention`); there a row that may attend to nothing gives 0.
    Source: Vaswani et al. 2017; torch.nn.functional.scaled_dot_product_attention.
    """
    batch, (_, queries, heads, width) = max(len(q), len(k)), q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    undropped = rngs is None or dropout_rate == 0.0
    if bias is None and undropped and fused_attention.takes(q, k, v, mask, causal):
        return fused_attention.fused(q, k, v, mask=mask, causal=causal, scale=scale)
    if kv_heads != heads:
        k, v = (jnp.repeat(x, heads // kv_heads, axis=2) for x in (k, v))
    q, k = (x.astype(jnp.promote_types(q.dtype, k.dtype)) for x in (q, k))
    q, k, v = (jnp.broadcast_to(jnp.swapaxes(x, 1, 2), (batch, heads, x.shape[1], x.shape[3])) for x in (q, k, v))
    scores = _scores(q, k).astype(jnp.promote_types(q.dtype, jnp.float32))
    scores = scores * (width**-0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    if causal:
        visible = jnp.arange(keys)[None, :] <= jnp.arange(queries)[:, None] + (keys - queries)
        mask = visible if mask is None else mask & visible
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    weights = dropout(jax.nn.softmax(scores, axis=-1).astype(v.dtype), dropout_rate, rngs)
    return jnp.swapaxes(_weighted(weights, v), 1, 2)


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


class MultiheadAttention(nnx.Module):
    """torch.nn.MultiheadAttention(embed_dim, num_heads, dropout, batch_first=True) with its fused in_proj.

    in_proj_weight: [3 width, width], rows [query; key; value]; in_proj_bias: [3 width]; out_proj: Linear.
    """

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, *, rngs: nnx.Rngs):
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim={embed_dim} is not a multiple of num_heads={num_heads}")
        self.in_proj_weight = nnx.Param(initializers.xavier_uniform(rngs.params(), (3 * embed_dim, embed_dim)))
        self.in_proj_bias = nnx.Param(jnp.zeros(3 * embed_dim))
        self.out_proj = Linear(embed_dim, embed_dim, rngs=rngs)
        self.out_proj.bias.set_value(jnp.zeros(embed_dim))
        self.num_heads = num_heads
        self.dropout = dropout

    def __call__(
        self, query, key=None, value=None, *, key_padding_mask=None, causal=False, mask=None, bias=None, rngs=None
    ):
        """query: [batch or 1, query, width]; key, value: [batch, key, width]; value is `key`, and both are `query`, if
        left out. A query of batch 1 is asked of every key's batch.
        key_padding_mask: bool [batch, key], True = ignore that key. mask: bool, broadcastable to
        [batch, head, query, key], True = may attend. bias: added to the scores, same shape."""
        in_weight, in_bias = self.in_proj_weight[...], self.in_proj_bias[...]
        if key is None:
            q, k, v = jnp.split(linear(query, in_weight, in_bias), 3, axis=-1)
        elif value is None:
            width = in_weight.shape[1]
            q = linear(query, in_weight[:width], in_bias[:width])
            k, v = jnp.split(linear(key, in_weight[width:], in_bias[width:]), 2, axis=-1)
        else:
            parts = zip((query, key, value), jnp.split(in_weight, 3), jnp.split(in_bias, 3), strict=True)
            q, k, v = (linear(x, w, b) for x, w, b in parts)
        if key_padding_mask is not None:
            visible = ~key_padding_mask[:, None, None, :]
            mask = visible if mask is None else mask & visible
        q, k, v = (x.reshape(*x.shape[:-1], self.num_heads, -1) for x in (q, k, v))
        y = attention(q, k, v, mask=mask, bias=bias, causal=causal, dropout_rate=self.dropout, rngs=rngs)
        return self.out_proj(y.reshape(*y.shape[:-2], -1))


def rotary_table(positions, width: int, theta: float = 10000.0):
    """cos and sin [..., width] of positions [...] for `rotate`. Source: Su et al. 2021, in Hugging Face's layout."""
    frequencies = theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x, cos, sin):
    """Rotate the halves of x [batch, time, head, width] by the table [batch or 1, time, width]."""
    first, second = jnp.split(x, 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    return x * cos[..., None, :].astype(x.dtype) + turned * sin[..., None, :].astype(x.dtype)
