"""Scaled dot-product attention, kept whole by the export so that a device's fused kernel can take it."""

import functools
import logging

import jax
import jax.numpy as jnp

from torch_bridge.lowering.dtypes import match_products
from torch_bridge.lowering.table import lowering

log = logging.getLogger(__name__)


@lowering("scaled_dot_product_attention.default")
def scaled_dot_product_attention(
    call, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
):
    """q: [..., head, query, width]; k, v: [..., kv_head, key, width]; attn_mask: bool (True = may attend) or a bias,
    broadcastable to [..., head, query, key]. A query that may attend to nothing gives 0, as in torch.
    Source: torch.nn.functional.scaled_dot_product_attention."""
    q, k, v = match_products(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if enable_gqa and k.shape[-3] != q.shape[-3]:
        k, v = (jnp.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in (k, v))
    if _fusable(q, k, v, attn_mask, dropout_p):
        return _fused(q, k, v, attn_mask, is_causal, scale)
    scores = jnp.einsum("...qd,...kd->...qk", q, k, preferred_element_type=jnp.float32) * scale
    visible = jnp.tri(q.shape[-2], k.shape[-2], dtype=bool) if is_causal else None
    if attn_mask is not None and attn_mask.dtype == jnp.bool_:
        visible = attn_mask if visible is None else visible & attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask
    if visible is not None:
        scores = jnp.where(visible, scores, -jnp.inf)
    weights = _softmax(scores, masked=attn_mask is not None)
    if dropout_p:
        keep = jax.random.bernoulli(call.key(), 1 - dropout_p, weights.shape)
        weights = jnp.where(keep, weights / (1 - dropout_p), 0)
    return jnp.einsum("...qk,...kd->...qd", weights.astype(v.dtype), v)


def _softmax(scores, masked: bool):
    """A row of -inf gives zeros, and zero gradient."""
    if not masked:
        return jax.nn.softmax(scores, axis=-1)
    blind = jnp.all(jnp.isneginf(scores), axis=-1, keepdims=True)
    return jnp.where(blind, 0, jax.nn.softmax(jnp.where(blind, 0, scores), axis=-1))


def _fusable(q, k, v, mask, dropout_p) -> bool:
    """cuDNN takes half precision, [batch, head, token, width] with widths in steps of 8 up to 128, no dropout."""
    return (
        q.ndim == 4
        and not dropout_p
        and q.dtype in (jnp.bfloat16, jnp.float16)
        and q.shape[-1] == v.shape[-1]
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 128
        and (mask is None or mask.ndim == 4)
        and min(q.shape[-2], k.shape[-2]) > 1
        and cudnn_attention()
    )


def _fused(q, k, v, mask, is_causal, scale):
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    boolean = mask is not None and mask.dtype == jnp.bool_
    y = jax.nn.dot_product_attention(
        q,
        k,
        v,
        bias=None if mask is None or boolean else mask.astype(q.dtype),
        mask=mask if boolean else None,
        is_causal=is_causal,
        scale=scale,
        implementation="cudnn",
    )
    return jnp.swapaxes(y, 1, 2)


@functools.cache
def cudnn_attention() -> bool:
    """Whether this process's device runs cuDNN's attention, found by a small trial once."""
    if jax.default_backend() != "gpu":
        return False
    x = jnp.zeros((1, 64, 1, 64), jnp.bfloat16)
    try:
        with jax.ensure_compile_time_eval():
            jax.nn.dot_product_attention(x, x, x, implementation="cudnn").block_until_ready()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        log.info("attention runs as plain XLA: cuDNN's kernel is not available here (%s)", error)
        return False
    log.info("attention runs as cuDNN's fused kernel where it is half precision, without dropout")
    return True
