"""Backward operators that torch's autograd emits and that no rule takes apart: jax.vjp of the forward's lowering.

torch.autograd's graphs hold them beside the forward operators; XLA computes what both have in common once.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from torch_bridge.lowering.table import TABLE, lowering


def pulled(forward: Callable, slope: Any, *xs: Any) -> tuple:
    """Return the gradients of forward(*xs) by each x. Raises NotImplementedError for complex numbers."""
    if any(jnp.iscomplexobj(x) for x in (slope, *xs)):
        raise NotImplementedError("the backward operator of complex numbers")
    y, pull = jax.vjp(forward, *xs)
    return pull(slope.astype(y.dtype))


def _wanted(mask, *grads):
    """Return None for gradients that torch does not ask for."""
    return tuple(grad if asked else None for asked, grad in zip(mask, grads, strict=True))


@lowering("convolution_backward.default")
def convolution_backward(
    call, slope, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask
):
    forward = TABLE["aten.convolution.default"]
    run = lambda x, w: forward(call, x, w, None, stride, padding, dilation, transposed, output_padding, groups)
    if mask[0] and mask[1]:
        dx, dw = pulled(run, slope, x, weight)
    else:
        dx = pulled(lambda x: run(x, weight), slope, x)[0] if mask[0] else None
        dw = pulled(lambda w: run(x, w), slope, weight)[0] if mask[1] else None
    db = jnp.sum(slope, axis=(0, *range(2, slope.ndim)), dtype=jnp.promote_types(slope.dtype, jnp.float32))
    return _wanted(mask, dx, dw, db.astype(slope.dtype))


def _transposed(name: str, forward: str) -> None:
    """Register name(slope, x, *rest) as the transpose of forward(x, *rest)."""

    @lowering(name)
    def run(call, slope, x, *rest, **options):
        return pulled(lambda x: TABLE[forward](call, x, *rest, **options), slope, x)[0]


for _name in ("avg_pool2d", "avg_pool3d"):
    _transposed(f"{_name}_backward.default", f"aten.{_name}.default")


def _adaptive(name: str, axes: int) -> None:
    @lowering(f"{name}_backward.default")
    def run(call, slope, x):
        """The size of the result is that of its slope."""
        forward = TABLE[f"aten.{name}.default"]
        return pulled(lambda x: forward(call, x, slope.shape[-axes:]), slope, x)[0]


_adaptive("_adaptive_avg_pool2d", 2)
_adaptive("_adaptive_avg_pool3d", 3)


def _max_pool(name: str, axes: int) -> None:
    @lowering(f"{name}_backward.default")
    def run(call, slope, x, *options):
        """Add each slope at the position that the forward pass has picked, the last argument."""
        indices, space = options[-1], x.ndim - axes
        flat = lambda y: y.reshape(*y.shape[:space], -1)
        rows = flat(jnp.zeros(x.shape, slope.dtype)).reshape(-1, max(flat(x).shape[-1], 1))
        places, slopes = (flat(y).reshape(rows.shape[0], -1) for y in (indices, slope))
        at = jnp.arange(rows.shape[0])[:, None]
        return rows.at[at, places].add(slopes).reshape(x.shape)


_max_pool("max_pool3d_with_indices", 3)
_max_pool("adaptive_max_pool2d", 2)
_max_pool("adaptive_max_pool3d", 3)


@lowering("rrelu_with_noise_backward.default")
def rrelu_backward(call, slope, x, noise, lower, upper, training, self_is_result):
    """noise: the factors that forward has drawn."""
    return slope * noise if training and upper - lower > 1e-6 else jnp.where(x > 0, slope, slope * (lower + upper) / 2)


def _grid(name: str) -> None:
    @lowering(f"{name}_backward.default")
    def run(call, slope, x, grid, mode, padding, corners, mask):
        forward = TABLE[f"aten.{name}.default"]
        dx, dg = pulled(lambda x, g: forward(call, x, g, mode, padding, corners), slope, x, grid)
        return _wanted(mask, dx, dg)


_grid("grid_sampler_2d")
_grid("grid_sampler_3d")


@lowering("_cdist_backward.default")
def cdist_backward(call, slope, x1, x2, p, distances):
    forward = TABLE["aten._cdist_forward.default"]
    return pulled(lambda x: forward(call, x, x2, p, None), slope, x1)[0]


@lowering("_fused_rms_norm.default")
def fused_rms_norm(call, x, normalized_shape, weight, eps):
    """Return the output and 1/root mean square, [..., 1]."""
    axes = tuple(range(-len(normalized_shape), 0))
    eps = float(jnp.finfo(x.dtype).eps) if eps is None else eps
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return TABLE["aten.rms_norm.default"](call, x, normalized_shape, weight, eps), jax.lax.rsqrt(
        jnp.mean(jnp.square(y), axes, keepdims=True) + eps
    )


@lowering("_fused_rms_norm_backward.default")
def fused_rms_norm_backward(call, slope, x, normalized_shape, rstd, weight, mask):
    """Return the gradients of x and weight; rstd is what forward has returned."""
    axes, rows = tuple(range(-len(normalized_shape), 0)), tuple(range(x.ndim - len(normalized_shape)))
    wide = lambda y: y.astype(jnp.promote_types(y.dtype, jnp.float32))
    y, g = wide(x) * rstd, wide(slope)
    scaled = g if weight is None else g * wide(weight)
    dx = rstd * (scaled - y * jnp.mean(scaled * y, axes, keepdims=True))
    dw = None if weight is None or not mask[1] else jnp.sum(g * y, rows).astype(weight.dtype)
    return dx.astype(x.dtype) if mask[0] else None, dw


@lowering("prims.convert_element_type.default")
def convert_element_type(call, x, dtype):
    return TABLE["aten._to_copy.default"](call, x, dtype=dtype)


@lowering("prims.fma.default")
def fused_multiply_add(call, x, y, z):
    return x * y + z


@lowering("_weight_norm_interface_backward.default")
def weight_norm_backward(call, slope, v, g, norms, dim):
    """Return the gradients of v and g in v * g / |v|. norms: |v| over all axes but `dim`, in g's shape."""
    axes = tuple(axis for axis in range(v.ndim) if axis != dim % v.ndim)
    sums = jnp.sum(slope * v, axis=axes, keepdims=True)
    return g / norms * (slope - v * (sums / jnp.square(norms))), sums / norms


@lowering("torch_bridge.after.default")
def after(call, values, known):
    return jax.lax.optimization_barrier((list(values), list(known)))[0]


@lowering("torch_bridge.attention.default")
def attention(call, q, k, v, mask, causal, scale, grouped):
    forward = TABLE["aten.scaled_dot_product_attention.default"]
    return forward(call, q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=grouped)


@lowering("torch_bridge.attention_backward.default")
def attention_backward(call, slope, q, k, v, mask, causal, scale, grouped, of_mask):
    if of_mask:
        return list(pulled(lambda *x: attention(call, *x, causal, scale, grouped), slope, q, k, v, mask))
    return list(pulled(lambda *x: attention(call, *x, mask, causal, scale, grouped), slope, q, k, v))


@lowering("_scaled_dot_product_flash_attention_for_cpu.default")
def flash_attention(call, q, k, v, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    """Return attention, and the logarithms of the sums of its rows, which torch's backward of this operator reads."""
    scores = jnp.einsum("...qd,...kd->...qk", q, k, preferred_element_type=jnp.promote_types(q.dtype, jnp.float32))
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        scores = jnp.where(attn_mask, scores, -jnp.inf) if attn_mask.dtype == jnp.bool_ else scores + attn_mask
    if is_causal:
        scores = jnp.where(jnp.tri(*scores.shape[-2:], dtype=bool), scores, -jnp.inf)
    return attention(call, q, k, v, attn_mask, is_causal, scale, False), jax.nn.logsumexp(scores, -1)


@lowering("_scaled_dot_product_flash_attention_for_cpu_backward.default")
def flash_attention_backward(call, slope, q, k, v, y, sums, dropout_p, is_causal, *, attn_mask=None, scale=None):
    return attention_backward(call, slope, q, k, v, attn_mask, is_causal, scale, False, False)
