"""Cross-correlation of [batch, channel, *space], in the form that each device computes fastest.

XLA's CPU backend has a fast kernel for channels-last convolutions. It converts other layouts to that form only outside
loops, so several steps in one call would cost twice the time. Here the form is written out, for both gradients too.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

MOST_TAPS, MOST_GROUPS = 49, 32  # on a CPU: entries of a depthwise kernel; groups computed one after another
MOST_NEIGHBOURS = 16  # copies of the input that a kernel's gradient holds at a time

Pads = tuple[tuple[int, int], ...]


def correlate(
    x: jax.Array,
    weight: jax.Array,
    stride: Sequence[int],
    pads: Sequence[tuple[int, int]],
    gaps: Sequence[int] | None = None,
    dilation: Sequence[int] | None = None,
    groups: int = 1,
) -> jax.Array:
    """Correlate x [batch, in, *space] with weight [out, in / groups, *kernel] to [batch, out, *space].

    pads: zeros before and after each spatial axis. gaps: spacing of the input's elements (lhs dilation). dilation:
    spacing of the kernel's elements. Source: jax.lax.conv_general_dilated; torch.nn.functional.conv2d.
    """
    ones = (1,) * (x.ndim - 2)
    pads = tuple((before, after) for before, after in pads)
    shape = (tuple(stride), pads, tuple(gaps or ones), tuple(dilation or ones))
    if groups == 1 and _is_pointwise(x, weight, *shape):
        together = lambda x, weight: _by_group(x, weight, *shape)
        return jax.lax.platform_dependent(x, weight, cpu=_by_place, default=together)
    if groups == 1:
        return _correlate(x, weight, *shape)
    together = lambda x, weight: _by_group(x, weight, *shape, groups)
    if groups == x.shape[1] == weight.shape[0] and shape[2] == ones and math.prod(weight.shape[2:]) <= MOST_TAPS:
        apart = lambda x, weight: _by_tap(x, weight, stride, pads, shape[3])
    elif groups <= MOST_GROUPS:
        apart = lambda x, weight: _one_by_one(x, weight, shape, groups)
    else:
        return together(x, weight)
    return jax.lax.platform_dependent(x, weight, cpu=apart, default=together)


def _is_pointwise(x, weight, stride, pads: Pads, gaps, dilation) -> bool:
    """Return True for a 1x1 kernel on enough positions that a matrix product per sample is worthwhile."""
    places = math.prod(x.shape[2:])
    plain = max(weight.shape[2:]) == max(stride) == max(gaps) == 1 and not any(map(any, pads))
    return plain and places >= min(weight.shape[:2])


def _by_place(x, weight):
    """Apply a 1x1 kernel as a matrix product per sample, which transposes nothing."""
    kernels = jnp.broadcast_to(weight.reshape(weight.shape[:2]), (x.shape[0], *weight.shape[:2]))
    return jnp.matmul(kernels, x.reshape(*x.shape[:2], -1)).reshape(x.shape[0], weight.shape[0], *x.shape[2:])


def _by_tap(x, weight, stride, pads: Pads, dilation):
    """Apply a depthwise kernel as a sum over its entries. XLA's CPU backend has no fast kernel for depthwise
    convolutions, but fuses this sum into one loop."""
    padded = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * 2 + [(*pad, 0) for pad in pads])
    spans = [_span(k, d) for k, d in zip(weight.shape[2:], dilation, strict=True)]
    sizes = [(n - span) // s + 1 for n, span, s in zip(padded.shape[2:], spans, stride, strict=True)]
    total: Any = 0
    for entry in np.ndindex(*weight.shape[2:]):
        starts = [place * d for place, d in zip(entry, dilation, strict=True)]
        ends = [first + _span(n, s) for first, n, s in zip(starts, sizes, stride, strict=True)]
        seen = jax.lax.slice(padded, [0, 0, *starts], [*x.shape[:2], *ends], [1, 1, *stride])
        total = total + seen * weight[(slice(None), 0, *entry)].reshape(-1, *[1] * len(sizes))
    return checkpoint_name(total, "correlation")  # expensive to recompute


def _one_by_one(x, weight, shape, groups: int):
    """Compute a convolution per group, each in the fast form."""
    parts = zip(jnp.split(x, groups, axis=1), jnp.split(weight, groups, axis=0), strict=True)
    return jnp.concatenate([_correlate(part, kernel, *shape) for part, kernel in parts], axis=1)


def _by_group(x, weight, stride, pads: Pads, gaps, dilation, groups: int = 1):
    return jax.lax.conv_general_dilated(x, weight, stride, pads, gaps, dilation, feature_group_count=groups)


def _channels_last(x, weight, stride, pads: Pads, gaps, dilation):
    """Correlate x [batch, *space, in] with weight [*kernel, in, out] to [batch, *space, out]."""
    space = "DHW"[-len(stride) :]
    names = ("N" + space + "C", space + "IO", "N" + space + "C")
    return jax.lax.conv_general_dilated(x, weight, stride, pads, gaps, dilation, dimension_numbers=names)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _correlate(x, weight, stride, pads, gaps, dilation):
    def on_cpu(x, weight):
        y = _channels_last(jnp.moveaxis(x, 1, -1), _kernel_last(weight), stride, pads, gaps, dilation)
        return jnp.moveaxis(y, -1, 1)

    otherwise = lambda x, weight: _by_group(x, weight, stride, pads, gaps, dilation)
    return jax.lax.platform_dependent(x, weight, cpu=on_cpu, default=otherwise)


def _forward(x, weight, stride, pads, gaps, dilation):
    return _correlate(x, weight, stride, pads, gaps, dilation), (x, weight)


def _backward(stride, pads, gaps, dilation, kept, dy):
    def on_cpu(x, weight, dy):
        sizes = list(zip(x.shape[2:], weight.shape[2:], dy.shape[2:], stride, pads, gaps, dilation, strict=True))
        last = jnp.moveaxis(dy, 1, -1)
        flipped = jnp.flip(jnp.moveaxis(weight, (0, 1), (-2, -1)), tuple(range(weight.ndim - 2)))  # [*kernel, out, in]
        pads_of_input = tuple(_pads_of_input(*s) for s in sizes)
        dx = _channels_last(last, flipped, gaps, pads_of_input, stride, dilation)
        x, kernel = jnp.moveaxis(x, 1, -1), weight.shape[2:]
        if max(gaps) > 1 and max(stride) == 1:  # use windows of the output's gradient; those of x are mostly zeros
            dw = _window_products(last, x, kernel, gaps, pads_of_input, dilation)  # [*kernel, out, in], from its end
            return jnp.moveaxis(dx, -1, 1), jnp.moveaxis(jnp.flip(dw, range(len(kernel))), (-2, -1), (0, 1))
        spread = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *((0, 0, gap - 1) for gap in gaps), (0, 0, 0)])
        dw = _window_products(spread, last, kernel, stride, tuple(_pads_of_kernel(*s) for s in sizes), dilation)
        return jnp.moveaxis(dx, -1, 1), jnp.moveaxis(dw, (-1, -2), (0, 1))

    def otherwise(x, weight, dy):
        return jax.vjp(lambda x, weight: _by_group(x, weight, stride, pads, gaps, dilation), x, weight)[1](dy)

    return jax.lax.platform_dependent(*kept, dy, cpu=on_cpu, default=otherwise)


_correlate.defvjp(_forward, _backward)


def _window_products(x, y, kernel, stride, pads: Pads, dilation):
    """Sum x's windows times y over all positions. x: [batch, *space, a], y: [batch, *out, b] -> [*kernel, a, b].

    Computed as matrix products, one for a few neighbouring kernel entries each. As a convolution, with the batch as
    channels, it takes XLA's CPU backend two to four times as long.
    """
    padded = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *((*pad, 0) for pad in pads), (0, 0, 0)])
    out, rank = y.shape[1:-1], len(kernel)
    rows = y.reshape(-1, y.shape[-1])

    def shifted(value, axis: int, place: int):
        first, step = place * dilation[axis], stride[axis]
        return jax.lax.slice_in_dim(value, first, first + _span(out[axis], step), step, axis + 1)

    found = []
    for first in range(0, kernel[-1], MOST_NEIGHBOURS):
        places = range(first, min(first + MOST_NEIGHBOURS, kernel[-1]))
        wide = jnp.concatenate([shifted(padded, rank - 1, place) for place in places], axis=-1)
        products = []
        for entry in np.ndindex(*kernel[:-1]):
            part = wide
            for axis, place in enumerate(entry):
                part = shifted(part, axis, place)
            products.append(part.reshape(-1, part.shape[-1]).T @ rows)
        found.append(jnp.stack(products).reshape(*kernel[:-1], len(places), x.shape[-1], y.shape[-1]))
    return jnp.concatenate(found, axis=rank - 1)


def _kernel_last(weight: jax.Array) -> jax.Array:
    """Transpose [out, in, *kernel] to [*kernel, in, out]."""
    return jnp.moveaxis(weight, (1, 0), (-2, -1))


def _pads_of_input(size, kernel, out, stride, pads, gap, dilation) -> tuple[int, int]:
    """Return the padding of the output's gradient, dilated by the stride, whose correlation is the input's gradient."""
    reach, spread, wide = _span(kernel, dilation), _span(out, stride), _span(size, gap)
    before = reach - 1 - pads[0]
    return before, wide + reach - 1 - spread - before


def _pads_of_kernel(size, kernel, out, stride, pads, gap, dilation) -> tuple[int, int]:
    """Return the padding of the input whose correlation with the output's gradient is the kernel's gradient."""
    return pads[0], _span(out, stride) + _span(kernel, dilation) - _span(size, gap) - 1 - pads[0]


def _span(count: int, spacing: int) -> int:
    return (count - 1) * spacing + 1
