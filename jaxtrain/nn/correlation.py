"""Cross-correlation of [batch, channel, *space], in the form that each device computes fastest.

On a CPU the output and each gradient have forms of their own, chosen by shape (`correlation_forms`); other devices get
XLA's convolution. The output, the input's gradient and the kernel's are linear in each of their two arguments, and the
derivatives of each are the other two, so that derivatives of any order take these forms.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.nn import correlation_forms as forms
from jaxtrain.nn.correlation_forms import Pads, Shape, Window, span

MOST_TAPS, MOST_GROUPS = 49, 32  # on a CPU: entries of a depthwise kernel; groups computed one after another


class Spacing(NamedTuple):
    """Arguments of a convolution: strides, zeros before and after, spacing of the input and of the kernel, by axis."""

    stride: Shape
    pads: Pads
    gaps: Shape
    dilation: Shape


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
    spacing = Spacing(tuple(stride), pads, tuple(gaps or ones), tuple(dilation or ones))
    if groups == 1:
        return _output(x, weight, spacing)
    together = lambda x, weight: _by_xla(x, weight, spacing, groups)
    if groups == x.shape[1] == weight.shape[0] and spacing.gaps == ones and math.prod(weight.shape[2:]) <= MOST_TAPS:
        apart = lambda x, weight: _by_tap(x, weight, spacing.stride, pads, spacing.dilation)
    elif groups <= MOST_GROUPS:
        apart = lambda x, weight: _one_by_one(x, weight, spacing, groups)
    else:
        return together(x, weight)
    return jax.lax.platform_dependent(x, weight, cpu=apart, default=together)


def _by_tap(x, weight, stride, pads: Pads, dilation):
    """Apply a depthwise kernel as a sum over its entries. XLA's CPU backend has no fast kernel for depthwise
    convolutions, but fuses this sum into one loop."""
    padded = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * 2 + [(*pad, 0) for pad in pads])
    spans = [span(k, d) for k, d in zip(weight.shape[2:], dilation, strict=True)]
    sizes = [(n - span) // s + 1 for n, span, s in zip(padded.shape[2:], spans, stride, strict=True)]
    total: Any = 0
    for entry in np.ndindex(*weight.shape[2:]):
        starts = [place * d for place, d in zip(entry, dilation, strict=True)]
        ends = [first + span(n, s) for first, n, s in zip(starts, sizes, stride, strict=True)]
        seen = jax.lax.slice(padded, [0, 0, *starts], [*x.shape[:2], *ends], [1, 1, *stride])
        total = total + seen * weight[(slice(None), 0, *entry)].reshape(-1, *[1] * len(sizes))
    return checkpoint_name(total, "correlation")  # expensive to recompute


def _one_by_one(x, weight, spacing: Spacing, groups: int):
    """Compute a convolution per group, each in its fastest form."""
    parts = zip(jnp.split(x, groups, axis=1), jnp.split(weight, groups, axis=0), strict=True)
    return jnp.concatenate([_output(part, kernel, spacing) for part, kernel in parts], axis=1)


def _by_xla(x, weight, spacing: Spacing, groups: int = 1):
    return jax.lax.conv_general_dilated(x, weight, *spacing, feature_group_count=groups)


# The output y of x and weight, dx of dy and weight, dw of x and dy. shape: that of the result's spatial axes.


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _output(x, weight, spacing: Spacing):
    function = lambda x, weight: _by_xla(x, weight, spacing)
    return _on_each(_output_on_cpu(x, weight, spacing), function, x, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _input_gradient(dy, weight, spacing: Spacing, shape: Shape):
    like = jax.ShapeDtypeStruct((dy.shape[0], weight.shape[1], *shape), dy.dtype)
    function = lambda dy, weight: jax.linear_transpose(lambda x: _by_xla(x, weight, spacing), like)(dy)[0]
    return _on_each(_input_on_cpu(dy, weight, spacing, shape), function, dy, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _kernel_gradient(x, dy, spacing: Spacing, shape: Shape):
    like = jax.ShapeDtypeStruct((dy.shape[1], x.shape[1], *shape), x.dtype)
    function = lambda x, dy: jax.linear_transpose(lambda weight: _by_xla(x, weight, spacing), like)(dy)[0]
    return _on_each(_kernel_on_cpu(x, dy, spacing, shape), function, x, dy)


def _both(function):
    """Return a forward rule that keeps both arguments."""
    return lambda left, right, *static: (function(left, right, *static), (left, right))


def _output_backward(spacing, kept, dy):
    x, weight = kept
    return _input_gradient(dy, weight, spacing, x.shape[2:]), _kernel_gradient(x, dy, spacing, weight.shape[2:])


def _input_backward(spacing, shape, kept, dx):
    dy, weight = kept
    return _output(dx, weight, spacing), _kernel_gradient(dx, dy, spacing, weight.shape[2:])


def _kernel_backward(spacing, shape, kept, dw):
    x, dy = kept
    return _input_gradient(dy, dw, spacing, x.shape[2:]), _output(x, dw, spacing)


_output.defvjp(_both(_output), _output_backward)
_input_gradient.defvjp(_both(_input_gradient), _input_backward)
_kernel_gradient.defvjp(_both(_kernel_gradient), _kernel_backward)


def _on_each(on_cpu, by_xla, left, right):
    """Run the CPU's form, where there is one, and XLA's convolution on other devices."""
    if on_cpu is None or not jnp.issubdtype(left.dtype, jnp.floating) or not left.size * right.size:
        return by_xla(left, right)
    return jax.lax.platform_dependent(left, right, cpu=_in_lanes(on_cpu), default=by_xla)


def _in_lanes(on_cpu):
    """Return the CPU's form with a rule for jax.vmap. Lanes that differ in both arguments, as runs of a sweep do, come
    one after another, as products with the windows of a few channels: as groups of one convolution they take 10 times
    as long (`python -m benchmarks.sweep --model cnn`)."""
    form = lambda left, right: on_cpu(left, right)
    function = jax.custom_batching.custom_vmap(form)

    @function.def_vmap
    def rule(size, mapped, left, right):
        if not all(mapped):
            return jax.vmap(form, [0 if of else None for of in mapped], axis_size=size)(left, right), True
        lane = functools.partial(on_cpu, lanes=True)
        return jax.lax.map(lambda pair: lane(*pair), (left, right)), True

    return function


def _output_on_cpu(x, weight, spacing: Spacing):
    window = Window(spacing.stride, spacing.pads, spacing.dilation)
    if max(spacing.gaps) == 1:
        return lambda x, weight, lanes=False: forms.output(x, weight, window, lanes=lanes)
    out = tuple(map(_out_size, x.shape[2:], weight.shape[2:], *spacing))
    if max(spacing.stride) > 1 or not math.prod(out):
        return None
    back = _transposed(weight.shape[2:], spacing)
    return lambda x, weight, lanes=False: forms.input_gradient(x, _turned(weight), back, out, lanes=lanes)


def _input_on_cpu(dy, weight, spacing: Spacing, shape: Shape):
    window = Window(spacing.stride, spacing.pads, spacing.dilation)
    if max(spacing.gaps) == 1:
        return lambda dy, weight, lanes=False: forms.input_gradient(dy, weight, window, shape, lanes=lanes)
    if max(spacing.stride) > 1:
        return None
    back = _transposed(weight.shape[2:], spacing)
    return lambda dy, weight, lanes=False: forms.output(dy, _turned(weight), back, lanes=lanes)


def _kernel_on_cpu(x, dy, spacing: Spacing, shape: Shape):
    window = Window(spacing.stride, spacing.pads, spacing.dilation)
    if max(spacing.gaps) == 1:
        return lambda x, dy, lanes=False: forms.kernel_gradient(x, dy, window, shape, lanes=lanes)
    if max(spacing.stride) > 1:
        return None
    back = _transposed(shape, spacing)
    return lambda x, dy, lanes=False: _turned(forms.kernel_gradient(dy, x, back, shape, lanes=lanes))


def _transposed(kernel: Shape, spacing: Spacing) -> Window:
    """Return the window of the correlation whose input gradient this is: one with gaps in its input, by the turned
    kernel."""
    axes = zip(kernel, spacing.pads, spacing.dilation, strict=True)
    pads = tuple((span(k, d) - 1 - before, span(k, d) - 1 - after) for k, (before, after), d in axes)
    return Window(spacing.gaps, pads, spacing.dilation)


def _turned(weight):
    """Exchange inputs and outputs of a kernel, and turn it around."""
    return jnp.flip(weight.swapaxes(0, 1), tuple(range(2, weight.ndim)))


def _out_size(size: int, kernel: int, stride: int, pads: tuple[int, int], gap: int, dilation: int) -> int:
    return (span(size, gap) + sum(pads) - span(kernel, dilation)) // stride + 1
