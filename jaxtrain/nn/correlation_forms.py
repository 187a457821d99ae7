"""Forms of a correlation and of its two gradients for the CPU, and the rule over shapes that chooses one.

XLA's CPU backend runs a channels-last convolution as fast as torch's library does, except where the map is hardly
larger than the kernel (it exchanges the two), where the output's gradient is spread by a stride (it multiplies by the
zeros), and for the kernel's gradient (whose kernel would be the map, and whose channels the batch). There, sums of
matrix products are faster. The rule was read off `python -m benchmarks.convolutions`, which times every form.

x: [batch, in, *space]; weight: [out, in, *kernel]; y and dy: [batch, out, *space]. Products are summed in float32 at
least.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SMALL_MAP, MIDDLE_MAP = 16, 64  # most positions of an output summed by kernel entries, of any and of WIDE channels
WIDE, THIN = 256, 16  # channels
FEW_WINDOWS = 8  # most positions of an output whose windows are one matrix for the kernel's gradient
DEEP = 128  # channels from which a kernel's gradient is computed entry by entry
NARROW = 32  # channels below which runs in lanes copy the windows of their maps
MOST_ENTRIES = 25  # of a kernel over a single channel that is summed by entries
MOST_PHASES = 8  # of a stride whose phases are computed by themselves
MOST_COPIED = 1 << 22  # numbers in the copies of the input that a kernel's gradient holds at a time: 16 MiB

Pads = tuple[tuple[int, int], ...]
Shape = tuple[int, ...]
Form = Callable[..., jax.Array]


class Window(NamedTuple):
    """How a kernel moves over a map: per axis the stride, zeros before and after, and spacing of the kernel."""

    stride: Shape
    pads: Pads
    dilation: Shape


def span(count: int, spacing: int) -> int:
    """Return the length of `count` entries at this spacing."""
    return (count - 1) * spacing + 1


def output_form(inputs: int, kernel: Shape, out: Shape) -> str:
    """Choose the form of the output. out: its positions per axis."""
    if math.prod(kernel) == 1:
        return "pointwise"
    small = _is_small(inputs, out) or inputs == 1 and math.prod(kernel) <= MOST_ENTRIES
    return "entries" if small else "direct"


def input_form(inputs: int, outputs: int, kernel: Shape, out: Shape, stride: Shape) -> str:
    """Choose the form of the input's gradient."""
    if math.prod(kernel) == 1:
        return "pointwise"
    if _is_small(outputs, out):
        return "entries"
    phases = inputs >= THIN and 1 < math.prod(stride) <= MOST_PHASES
    return "phases" if phases else "direct"


def kernel_form(inputs: int, outputs: int, kernel: Shape, out: Shape) -> str:
    """Choose the form of the kernel's gradient."""
    places = math.prod(out)
    if math.prod(kernel) == 1:
        return "samples" if places >= min(inputs, outputs) else "rows"
    if 1 < places <= FEW_WINDOWS:
        return "windows"
    return "entries" if inputs >= DEEP or places == 1 else "rows"


def _is_small(channels: int, out: Shape) -> bool:
    """Return True for a map on which products of `channels`, one for each kernel entry, beat XLA's convolution."""
    return math.prod(out) <= (MIDDLE_MAP if channels >= WIDE else SMALL_MAP)


def output(x: jax.Array, weight: jax.Array, window: Window, form: str | None = None, lanes: bool = False) -> jax.Array:
    """Correlate x with weight. lanes: it is one of many runs, in a loop. form: instead of the rule's choice."""
    out = out_size(x.shape[2:], weight.shape[2:], window)
    if lanes and 1 < x.shape[1] < NARROW and math.prod(weight.shape[2:]) > 1:
        form = form or "windows"
    form = form or output_form(x.shape[1], weight.shape[2:], out)
    return OUTPUT_FORMS[form](x, weight, window, out).astype(x.dtype)


def input_gradient(
    dy: jax.Array, weight: jax.Array, window: Window, size: Shape, form: str | None = None, lanes: bool = False
) -> jax.Array:
    """Return the gradient by x of spatial size `size`: the transposed correlation of dy."""
    if lanes and dy.shape[1] < NARROW and max(window.stride) == 1 and math.prod(weight.shape[2:]) > 1:
        form = form or "windows"
    form = form or input_form(weight.shape[1], weight.shape[0], weight.shape[2:], dy.shape[2:], window.stride)
    return INPUT_FORMS[form](dy, weight, window, size).astype(dy.dtype)


def kernel_gradient(
    x: jax.Array, dy: jax.Array, window: Window, kernel: Shape, form: str | None = None, lanes: bool = False
) -> jax.Array:
    """Return the gradient by a weight of spatial size `kernel`."""
    if lanes and 1 < x.shape[1] < NARROW and math.prod(kernel) > 1:
        form = form or "windows"
    form = form or kernel_form(x.shape[1], dy.shape[1], kernel, dy.shape[2:])
    return KERNEL_FORMS[form](x, dy, window, kernel).astype(x.dtype)


def out_size(size: Shape, kernel: Shape, window: Window) -> Shape:
    """Return the output's positions per axis."""
    axes = zip(size, kernel, *window, strict=True)
    return tuple((n + sum(pads) - span(k, d)) // s + 1 for n, k, s, pads, d in axes)


def _product(x, y):
    """Multiply matrices; sum half precision in float32."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return lax.dot_general(x, y, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=wide)


def _rows(x):
    """Return [batch, ..., channel] as rows of channels."""
    return x.reshape(-1, x.shape[-1])


def _last(x):
    return jnp.moveaxis(x, 1, -1)


def _first(x):
    return jnp.moveaxis(x, -1, 1)


def _cut(x, starts: Sequence[int], counts: Sequence[int], steps: Sequence[int]):
    """Return `counts` positions of x [batch, *space, channel], from `starts` in `steps`."""
    ends = [start + span(count, step) for start, count, step in zip(starts, counts, steps, strict=True)]
    return lax.slice(x, [0, *starts, 0], [x.shape[0], *ends, x.shape[-1]], [1, *steps, 1])


def _spread(x, starts: Sequence[int], steps: Sequence[int], size: Sequence[int]):
    """Undo `_cut`: put x's positions among zeros, in a map of this size."""
    axes = zip(x.shape[1:-1], starts, steps, size, strict=True)
    zeros = [(start, n - start - span(count, step), step - 1) for count, start, step, n in axes]
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *zeros, (0, 0, 0)])


def _meetings(size: Shape, kernel: Shape, out: Shape, window: Window):
    """Yield for each kernel entry that meets the map: the entry, the first input, first output and their number, each
    per axis. Zeros around the map are left out."""
    axes = []
    for n, k, o, s, (before, _), d in zip(size, kernel, out, *window, strict=True):
        met = []
        for place in range(k):
            offset = place * d - before
            low = max(0, -(offset // s))
            high = min(o - 1, (n - 1 - offset) // s)
            if high >= low:
                met.append((place, low * s + offset, low, high - low + 1))
        axes.append(met)
    for met in itertools.product(*axes):
        entry, inputs, outputs, counts = zip(*met, strict=True)
        yield entry, inputs, outputs, counts


# ---------------------------------------------------------------------------------------------------- the output


def _output_direct(x, weight, window: Window, out: Shape):
    return _first(_channels_last(_last(x), jnp.moveaxis(weight, (1, 0), (-2, -1)), window))


def _channels_last(x, weight, window: Window, gaps: Shape | None = None):
    """Correlate x [batch, *space, in] with weight [*kernel, in, out] to [batch, *space, out]."""
    if len(window.stride) == 3 and gaps is None:
        return _by_plane(x, weight, window)
    space = "HW"[-len(window.stride) :] if len(window.stride) < 3 else "DHW"
    names = ("N" + space + "C", space + "IO", "N" + space + "C")
    return lax.conv_general_dilated(
        x, weight, window.stride, window.pads, gaps, window.dilation, dimension_numbers=names
    )


def _by_plane(x, weight, window: Window):
    """Correlate volumes plane by plane, those that a kernel reaches joined as channels: XLA's convolution of volumes is
    four times slower than that of planes."""
    stride, pads, dilation = window
    depth, inputs, outputs = weight.shape[0], *weight.shape[-2:]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (*pads[0], 0), *[(0, 0, 0)] * 3])
    planes = (x.shape[1] - span(depth, dilation[0])) // stride[0] + 1
    begins = [place * dilation[0] for place in range(depth)]
    parts = [lax.slice_in_dim(x, at, at + span(planes, stride[0]), stride[0], 1) for at in begins]
    joined = jnp.concatenate(parts, -1)
    kernel = jnp.moveaxis(weight, 0, -3).reshape(*weight.shape[1:3], depth * inputs, outputs)
    flat = Window(stride[1:], pads[1:], dilation[1:])
    y = _channels_last(joined.reshape(-1, *joined.shape[2:]), kernel, flat)
    return y.reshape(x.shape[0], planes, *y.shape[1:])


def _output_entries(x, weight, window: Window, out: Shape):
    """Sum over the kernel's entries the product of each with the positions that it meets."""
    batch, x, ones = x.shape[0], _last(x), (1,) * len(out)
    parts = []
    for entry, inputs, outputs, counts in _meetings(x.shape[1:-1], weight.shape[2:], out, window):
        product = _product(_rows(_cut(x, inputs, counts, window.stride)), weight[(..., *entry)].T)
        parts.append(_spread(product.reshape(batch, *counts, -1), outputs, ones, out))
    return _first(_total(parts, (batch, *out, weight.shape[0]), x.dtype))


def _total(parts: list, shape: Shape, dtype) -> Any:
    return sum(parts[1:], parts[0]) if parts else jnp.zeros(shape, dtype)


def _output_windows(x, weight, window: Window, out: Shape):
    """Multiply the windows of all positions by the kernel."""
    x = _padded(_last(x), window)
    parts = [_cut(x, _begins(entry, window), out, window.stride) for entry in np.ndindex(*weight.shape[2:])]
    columns = jnp.moveaxis(weight, (1, 0), (-2, -1)).reshape(-1, weight.shape[0])  # [entry and in, out]
    product = _product(_rows(jnp.concatenate(parts, -1)), columns)
    return _first(product.reshape(x.shape[0], *out, -1))


def _output_pointwise(x, weight, window: Window, out: Shape):
    """Multiply by a 1x1 kernel."""
    x = _strided(x, window, out)
    return _by_place(x, weight.reshape(weight.shape[:2])).reshape(x.shape[0], weight.shape[0], *out)


def _by_place(x, matrix):
    """Multiply [out, in] by x [batch, in, *space] to [batch, out, places]: in each sample, which transposes nothing,
    if it has many places."""
    (batch, inputs), places = x.shape[:2], math.prod(x.shape[2:])
    if places < min(matrix.shape):
        return _product(_last(x).reshape(-1, inputs), matrix.T).reshape(batch, places, -1).swapaxes(1, 2)
    return jnp.matmul(jnp.broadcast_to(matrix, (batch, *matrix.shape)), x.reshape(batch, inputs, places))


def _strided(x, window: Window, out: Shape):
    """Return the input's positions that a 1x1 kernel meets, zeros around the map among them."""
    zero = jnp.zeros((), x.dtype)
    x = lax.pad(x, zero, [(0, 0, 0)] * 2 + [(*pads, 0) for pads in window.pads])
    ends = [span(o, s) for o, s in zip(out, window.stride, strict=True)]
    return lax.slice(x, [0] * x.ndim, [*x.shape[:2], *ends], [1, 1, *window.stride])


# ---------------------------------------------------------------------------------------------------- input gradient


def _input_direct(dy, weight, window: Window, size: Shape):
    flipped = jnp.flip(jnp.moveaxis(weight, (0, 1), (-2, -1)), tuple(range(len(size))))  # [*kernel, out, in]
    gaps = window.stride if max(window.stride) > 1 else None
    return _first(_channels_last(_last(dy), flipped, _back(dy, weight, window, size), gaps))


def _back(dy, weight, window: Window, size: Shape) -> Window:
    """Return how the turned kernel moves over dy, spread by the stride."""
    pads = []
    for n, k, o, s, (before, _), d in zip(size, weight.shape[2:], dy.shape[2:], *window, strict=True):
        ahead = span(k, d) - 1 - before
        pads.append((ahead, n + span(k, d) - 1 - span(o, s) - ahead))
    return Window((1,) * len(size), tuple(pads), window.dilation)


def _input_windows(dy, weight, window: Window, size: Shape):
    """Compute it as the output of the turned kernel, dy spread by the stride."""
    turned = jnp.flip(weight.swapaxes(0, 1), tuple(range(2, weight.ndim)))
    back = _back(dy, weight, window, size)
    zeros = [(0, 0, 0)] * 2 + [(0, 0, s - 1) for s in window.stride]
    return _output_windows(lax.pad(dy, jnp.zeros((), dy.dtype), zeros), turned, back, size)


def _input_entries(dy, weight, window: Window, size: Shape):
    """Sum over the kernel's entries each one's product, put where the entry met the map."""
    batch, kernel, out, dy = dy.shape[0], weight.shape[2:], dy.shape[2:], _last(dy)
    parts = []
    for entry, inputs, outputs, counts in _meetings(size, kernel, out, window):
        product = _product(_rows(_cut(dy, outputs, counts, (1,) * len(out))), weight[(..., *entry)])
        parts.append(_spread(product.reshape(batch, *counts, -1), inputs, window.stride, size))
    return _first(_total(parts, (batch, *size, weight.shape[1]), dy.dtype))


def _input_phases(dy, weight, window: Window, size: Shape):
    """Compute the positions of each phase of the stride by the kernel's entries that meet them, and interleave them."""
    rank, dy, out = len(size), _last(dy), dy.shape[2:]
    counts = [-(-n // s) for n, s in zip(size, window.stride, strict=True)]
    phases = [range(min(s, n)) for s, n in zip(window.stride, size, strict=True)]
    shape = (dy.shape[0], *counts, weight.shape[1])
    parts = []
    for phase in itertools.product(*phases):
        kernel, pads, spacing = weight, [], []
        for axis, first in enumerate(phase):
            (before, _), d, s = window.pads[axis], window.dilation[axis], window.stride[axis]
            met = [(first + before - place * d) // s for place in range(weight.shape[2 + axis])]
            entries = [e for e in range(weight.shape[2 + axis]) if (first + before - e * d) % s == 0][::-1]
            kernel = jnp.take(kernel, np.array(entries, int), 2 + axis)  # the last first: they go up the gradient
            if entries:
                low, high = met[entries[0]], met[entries[-1]]
                pads.append((-low, high + counts[axis] - out[axis]))
                spacing.append(met[entries[1]] - low if len(entries) > 1 else 1)
        if kernel.size:
            kernel = jnp.moveaxis(kernel, (0, 1), (-2, -1))
            parts.append(_channels_last(dy, kernel, Window((1,) * rank, tuple(pads), tuple(spacing))))
        else:
            parts.append(jnp.zeros(shape, dy.dtype))
    grid = jnp.stack(parts).reshape(*map(len, phases), *shape)
    order = [rank, *itertools.chain(*((rank + 1 + axis, axis) for axis in range(rank))), 2 * rank + 1]
    wide = [count * len(phase) for count, phase in zip(counts, phases, strict=True)]
    joined = grid.transpose(order).reshape(shape[0], *wide, shape[-1])
    return _first(lax.slice(joined, [0] * joined.ndim, [shape[0], *size, shape[-1]]))


def _input_pointwise(dy, weight, window: Window, size: Shape):
    out = dy.shape[2:]
    dx = _by_place(dy, weight.reshape(weight.shape[:2]).T).reshape(dy.shape[0], weight.shape[1], *out)
    axes = zip(size, out, window.stride, window.pads, strict=True)
    zeros = [(-before, n + before - span(o, s), s - 1) for n, o, s, (before, _) in axes]
    return lax.pad(dx, jnp.zeros((), dx.dtype), [(0, 0, 0)] * 2 + zeros)


def _kernel_entries(x, dy, window: Window, kernel: Shape):
    """Compute each kernel entry from the positions that it meets."""
    x, out, dy = _last(x), dy.shape[2:], _last(dy)
    met = {}
    for entry, inputs, outputs, counts in _meetings(x.shape[1:-1], kernel, out, window):
        left = _rows(_cut(dy, outputs, counts, (1,) * len(out))).T
        met[entry] = _product(left, _rows(_cut(x, inputs, counts, window.stride)))
    none = jnp.zeros((dy.shape[-1], x.shape[-1]), jnp.promote_types(x.dtype, jnp.float32))
    found = jnp.stack([met.get(entry, none) for entry in np.ndindex(*kernel)])
    return jnp.moveaxis(found.reshape(*kernel, *none.shape), (-2, -1), (0, 1))


def _kernel_windows(x, dy, window: Window, kernel: Shape):
    """Multiply dy by the windows of all positions, a matrix with a row for each."""
    out, x = dy.shape[2:], _padded(_last(x), window)
    parts = [_cut(x, _begins(entry, window), out, window.stride) for entry in np.ndindex(*kernel)]
    product = _product(_rows(_last(dy)).T, _rows(jnp.concatenate(parts, -1)))
    return _first(product.reshape(-1, *kernel, x.shape[-1]))


def _kernel_rows(x, dy, window: Window, kernel: Shape):
    """Multiply rows of shifted inputs, one for each channel and kernel entry, by dy: as many at a time as MOST_COPIED
    allows."""
    out, columns = dy.shape[2:], _rows(_last(dy))
    zeros = [(0, 0, 0)] * 2 + [(*pads, 0) for pads in window.pads]
    x = lax.pad(x.swapaxes(0, 1), jnp.zeros((), x.dtype), zeros)  # a row's positions lie next to each other
    entries = list(np.ndindex(*kernel))
    together = max(1, MOST_COPIED // (x.shape[0] * columns.shape[0]))
    products = []
    for first in range(0, len(entries), together):
        parts = []
        for entry in entries[first : first + together]:
            starts = _begins(entry, window)
            ends = [start + span(o, s) for start, o, s in zip(starts, out, window.stride, strict=True)]
            part = lax.slice(x, [0, 0, *starts], [*x.shape[:2], *ends], [1, 1, *window.stride])
            parts.append(part.reshape(x.shape[0], -1))
        products.append(_product(jnp.concatenate(parts), columns))
    found = jnp.concatenate(products).reshape(*kernel, x.shape[0], -1)
    return jnp.moveaxis(found, (-1, -2), (0, 1))


def _kernel_samples(x, dy, window: Window, kernel: Shape):
    """Compute a 1x1 kernel's gradient in each sample, which transposes nothing, and add."""
    out, (batch, outputs) = dy.shape[2:], dy.shape[:2]
    x = _strided(x, window, out)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    left, right = dy.reshape(batch, outputs, -1), x.reshape(batch, x.shape[1], -1)
    product = jnp.einsum("nol,ncl->noc", left, right, preferred_element_type=wide).sum(0)
    return product.reshape(outputs, x.shape[1], *kernel)


def _padded(x, window: Window):
    """Add the zeros around the map of x [batch, *space, channel]."""
    zeros = [(0, 0, 0), *((*pads, 0) for pads in window.pads), (0, 0, 0)]
    return lax.pad(x, jnp.zeros((), x.dtype), zeros)


def _begins(entry: Shape, window: Window) -> list[int]:
    return [place * d for place, d in zip(entry, window.dilation, strict=True)]


OUTPUT_FORMS: dict[str, Form] = {
    "direct": _output_direct,
    "entries": _output_entries,
    "pointwise": _output_pointwise,
    "windows": _output_windows,
}
INPUT_FORMS: dict[str, Form] = {
    "windows": _input_windows,
    "direct": _input_direct,
    "entries": _input_entries,
    "phases": _input_phases,
    "pointwise": _input_pointwise,
}
KERNEL_FORMS: dict[str, Form] = {
    "entries": _kernel_entries,
    "windows": _kernel_windows,
    "rows": _kernel_rows,
    "samples": _kernel_samples,
}
