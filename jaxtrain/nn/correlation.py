"""Cross-correlation of [batch, channel, *space], in the form each device computes fastest.

XLA's CPU backend has a fast kernel for channels-last convolutions, and brings others to that form only outside of
loops, so several steps in one call would pay twice over: here the form is spelt out, in both gradients too.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

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
    return _by_group(x, weight, *shape, groups) if groups > 1 else _correlate(x, weight, *shape)


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
