"""Cross-correlation of [batch, channel, *space], in the form each device computes fastest.

XLA's CPU backend has a fast kernel for channels-last convolutions, and brings others to that form only outside of
loops, so several steps in one call would pay twice over: here the form is spelt out, in both gradients too.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MOST_TAPS, MOST_GROUPS = 49, 32  # on a CPU: entries of a channel's own kernel, convolutions one after another

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
    """x: [batch, in, *space], weight: [out, in / groups, *kernel] -> [batch, out, *space].

    pads: zeros before and after each spatial axis. gaps: spacing put between the input's elements (lhs dilation).
    dilation: spacing of the kernel's elements. Source: jax.lax.conv_general_dilated; torch.nn.functional.conv2d.
    """
    ones = (1,) * (x.ndim - 2)
    pads = tuple((before, after) for before, after in pads)
    shape = (tuple(stride), pads, tuple(gaps or ones), tuple(dilation or ones))
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


def _by_tap(x, weight, stride, pads: Pads, dilation):
    """Each channel by its own kernel, as a sum over the kernel's entries: XLA's CPU backend has no fast kernel for it,
    and makes one loop of these."""
    padded = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * 2 + [(*pad, 0) for pad in pads])
    spans = [_span(k, d) for k, d in zip(weight.shape[2:], dilation, strict=True)]
    sizes = [(n - span) // s + 1 for n, span, s in zip(padded.shape[2:], spans, stride, strict=True)]
    total: Any = 0
    for entry in np.ndindex(*weight.shape[2:]):
        starts = [place * d for place, d in zip(entry, dilation, strict=True)]
        ends = [first + _span(n, s) for first, n, s in zip(starts, sizes, stride, strict=True)]
        seen = jax.lax.slice(padded, [0, 0, *starts], [*x.shape[:2], *ends], [1, 1, *stride])
        total = total + seen * weight[(slice(None), 0, *entry)].reshape(-1, *[1] * len(sizes))
    return total


def _one_by_one(x, weight, shape, groups: int):
    """A convolution per group, each in the fast form."""
    parts = zip(jnp.split(x, groups, axis=1), jnp.split(weight, groups, axis=0), strict=True)
    return jnp.concatenate([_correlate(part, kernel, *shape) for part, kernel in parts], axis=1)


def _by_group(x, weight, stride, pads: Pads, gaps, dilation, groups: int = 1):
    return jax.lax.conv_general_dilated(x, weight, stride, pads, gaps, dilation, feature_group_count=groups)


def _channels_last(x, weight, stride, pads: Pads, gaps, dilation):
    """The same with x: [batch, *space, in], weight: [*kernel, in, out] -> [batch, *space, out]."""
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
        dx = _channels_last(last, flipped, gaps, tuple(_pads_of_input(*s) for s in sizes), stride, dilation)
        by_sample = jnp.moveaxis(x, 0, -1)  # [in, *space, batch]: the batch is what is summed over
        dw = _channels_last(
            by_sample, jnp.moveaxis(last, 0, -2), dilation, tuple(_pads_of_kernel(*s) for s in sizes), gaps, stride
        )
        return jnp.moveaxis(dx, -1, 1), jnp.moveaxis(dw, -1, 0)

    def otherwise(x, weight, dy):
        return jax.vjp(lambda x, weight: _by_group(x, weight, stride, pads, gaps, dilation), x, weight)[1](dy)

    return jax.lax.platform_dependent(*kept, dy, cpu=on_cpu, default=otherwise)


_correlate.defvjp(_forward, _backward)


def _kernel_last(weight: jax.Array) -> jax.Array:
    """[out, in, *kernel] -> [*kernel, in, out]"""
    return jnp.moveaxis(weight, (1, 0), (-2, -1))


def _pads_of_input(size, kernel, out, stride, pads, gap, dilation) -> tuple[int, int]:
    """Zeros around the output's gradient, spread by the stride, so that its correlation is the input's gradient."""
    reach, spread, wide = _span(kernel, dilation), _span(out, stride), _span(size, gap)
    before = reach - 1 - pads[0]
    return before, wide + reach - 1 - spread - before


def _pads_of_kernel(size, kernel, out, stride, pads, gap, dilation) -> tuple[int, int]:
    """Zeros around the input, so that its correlation with the output's gradient is the kernel's gradient."""
    return pads[0], _span(out, stride) + _span(kernel, dilation) - _span(size, gap) - 1 - pads[0]


def _span(count: int, spacing: int) -> int:
    return (count - 1) * spacing + 1
