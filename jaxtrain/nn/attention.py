"""Scaled dot-product attention and torch's MultiheadAttention."""

import jax.numpy as jnp
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.nn import fused_attention, initializers, ring_attention
from jaxtrain.nn.attention_formula import formula
from jaxtrain.nn.linear import Linear, layer
from jaxtrain.nn.scopes import ATTENTION, named, within
from jaxtrain.runtime import traced_hparams


@within(ATTENTION)
def attention(
    q, k, v, *, mask=None, bias=None, lengths=None, causal=False, window=None, scale=None, dropout_rate=0.0, rngs=None
):
    """Compute softmax(q k^T scale + bias) v for each head, with the softmax in float32.

    q: [batch or 1, query, head, width]; k, v: [batch or 1, key, kv_head, width], where kv_head divides head (query head
    i reads kv head i // (head / kv_head)). mask: bool, broadcastable to [batch, head, query, key], True = may attend; a
    row that may attend to nothing gives NaN, as in torch. bias: added to the scores, same shape. lengths: int [batch],
    the number of visible keys of each sample, from the first; length 0 gives 0. causal: aligned so that the last query
    sees the last key. window: a query sees its own position and the window - 1 before it. Returns [batch, query, head,
    width]. On a GPU a fused kernel computes the cases it supports (`fused_attention`); there a row that may attend to
    nothing gives 0.
    Source: Vaswani et al. 2017; torch.nn.functional.scaled_dot_product_attention.
    """
    dropped = rngs is not None and dropout_rate != 0.0
    if ring_attention.is_needed(q.shape[1], k.shape[1], causal):
        _refuse_in_a_ring(mask=mask is not None, bias=bias is not None, window=window is not None, dropout=dropped)
        return ring_attention.attention(q, k, v, lengths=lengths, scale=scale)
    visibility = {"mask": mask, "lengths": lengths, "causal": causal, "window": window}
    if mask is not None and lengths is not None:
        raise ValueError("attention: a mask or lengths, not both; put the lengths into the mask")
    if bias is None and not dropped and fused_attention.takes(q, k, v, mask, causal, window):
        return fused_attention.fused(q, k, v, **visibility, scale=scale)
    if bias is None and rngs is not None and dropped and fused_attention.takes_dropout(q, k, v, mask, causal, window):
        kept = 1 - traced_hparams.current(dropout_rate)
        options = {"mask": mask, "lengths": lengths, "causal": causal, "scale": scale}
        return fused_attention.dropped(q, k, v, rngs(), kept, **options)
    fused_attention.chosen["formula"] += 1
    return formula(q, k, v, **visibility, bias=bias, scale=scale, dropout_rate=dropout_rate, rngs=rngs)


def _refuse_in_a_ring(**given: bool) -> None:
    if found := [name for name, is_given in given.items() if is_given]:
        raise UserError(
            f"shard.sequence: causal attention with {' and '.join(found)} is not offered where a sample's tokens lie "
            "on several devices; leave that out, or set shard.sequence=1"
        )


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

    @named
    def __call__(
        self, query, key=None, value=None, *, key_padding_mask=None, lengths=None, causal=False, mask=None, bias=None,
        rngs=None,
    ):  # fmt: skip
        """Return the attention's output [batch, query, width].

        query: [batch or 1, query, width]; key, value: [batch, key, width]. By default value is `key`, and key is
        `query`. A query of batch 1 is used for every sample of the keys. key_padding_mask: bool [batch, key], True =
        ignore that key. lengths: int [batch], an alternative to it if the ignored keys are the last ones of a sample.
        mask: bool, broadcastable to [batch, head, query, key], True = may attend. bias: added to the scores, same
        shape.
        """
        in_weight, in_bias = self.in_proj_weight[...], self.in_proj_bias[...]
        if key is None:
            q, k, v = jnp.split(layer(query, in_weight, in_bias), 3, axis=-1)
        elif value is None:
            width = in_weight.shape[1]
            q = layer(query, in_weight[:width], in_bias[:width])
            k, v = jnp.split(layer(key, in_weight[width:], in_bias[width:]), 2, axis=-1)
        else:
            parts = zip((query, key, value), jnp.split(in_weight, 3), jnp.split(in_bias, 3), strict=True)
            q, k, v = (layer(x, w, b) for x, w, b in parts)
        if key_padding_mask is not None:
            visible = ~key_padding_mask[:, None, None, :]
            mask = visible if mask is None else mask & visible
        q, k, v = (x.reshape(*x.shape[:-1], self.num_heads, -1) for x in (q, k, v))
        options = {"mask": mask, "bias": bias, "lengths": lengths, "causal": causal}
        y = attention(q, k, v, **options, dropout_rate=self.dropout, rngs=rngs)
        return self.out_proj(y.reshape(*y.shape[:-2], -1))


def rotary_table(positions, width: int, theta: float = 10000.0):
    """Return cos and sin [..., width] of positions [...], for `rotate`. Source: Su et al. 2021, in Hugging Face's
    layout."""
    frequencies = theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x, cos, sin):
    """Rotate the halves of x [batch, time, head, width] by the table [batch or 1, time, width]."""
    first, second = jnp.split(x, 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    return x * cos[..., None, :].astype(x.dtype) + turned * sin[..., None, :].astype(x.dtype)
