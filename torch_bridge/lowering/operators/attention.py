"""Scaled dot-product attention, kept whole by the export so that a device's fused kernel can compute it."""

import jax
import jax.numpy as jnp

from jaxtrain.nn import fused_attention
from jaxtrain.nn.dropout import dropout
from jaxtrain.nn.scopes import ATTENTION, within
from torch_bridge.lowering.dtypes import match_products
from torch_bridge.lowering.table import lowering


@lowering("scaled_dot_product_attention.default")
@within(ATTENTION)
def scaled_dot_product_attention(
    call, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
):
    """Compute attention. q: [..., head, query, width]; k, v: [..., kv_head, key, width]; attn_mask: bool (True = may
    attend) or a bias, broadcastable to [..., head, query, key]. A query that may attend to nothing gives 0, as in
    torch. Source: torch.nn.functional.scaled_dot_product_attention."""
    q, k, v = match_products(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if q.ndim == 4:
        tokens_first = jnp.swapaxes(q, 1, 2), jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
        if not dropout_p and fused_attention.takes(*tokens_first, attn_mask, is_causal):
            kind = "mask" if attn_mask is not None and attn_mask.dtype == jnp.bool_ else "bias"
            y = fused_attention.fused(*tokens_first, **{kind: attn_mask}, causal=is_causal, scale=scale)
            return jnp.swapaxes(y, 1, 2)
        if dropout_p and fused_attention.takes_dropout(*tokens_first, attn_mask, is_causal):
            options = {"mask": attn_mask, "causal": is_causal, "scale": scale}
            y = fused_attention.dropped(*tokens_first, call.key(), 1 - dropout_p, **options)
            return jnp.swapaxes(y, 1, 2)
        fused_attention.chosen["formula"] += 1
    if enable_gqa and k.shape[-3] != q.shape[-3]:
        k, v = (jnp.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in (k, v))
    scores = (
        jnp.einsum("...qd,...kd->...qk", q, k, preferred_element_type=jnp.promote_types(q.dtype, jnp.float32)) * scale
    )
    visible = jnp.tri(q.shape[-2], k.shape[-2], dtype=bool) if is_causal else None
    if attn_mask is not None and attn_mask.dtype == jnp.bool_:
        visible = attn_mask if visible is None else visible & attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask
    if visible is not None:
        scores = jnp.where(visible, scores, -jnp.inf)
    weights = _softmax(scores, masked=attn_mask is not None)
    if dropout_p:
        weights = dropout(weights, dropout_p, call.key)
    return jnp.einsum("...qk,...kd->...qd", weights.astype(v.dtype), v)


def _softmax(scores, masked: bool):
    """Compute softmax; if `masked`, a row of -inf gives zeros, with gradient 0."""
    if not masked:
        return jax.nn.softmax(scores, axis=-1)
    blind = jnp.all(jnp.isneginf(scores), axis=-1, keepdims=True)
    return jnp.where(blind, 0, jax.nn.softmax(jnp.where(blind, 0, scores), axis=-1))
