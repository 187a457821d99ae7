"""Pooling over windows, fixed and adaptive."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from torch_bridge.lowering.dtypes import wide
from torch_bridge.lowering.table import lowering

Size = int | Sequence[int]
MOST_ENTRIES = 27  # in windows whose maximum is found entry by entry


def _fit(values, rank: int, default: Sequence[int] = ()) -> list[int]:
    values = [values] if isinstance(values, int) else list(values)
    if not values:
        return list(default)
    return values * rank if len(values) == 1 else values


def _output_size(size, kernel, stride, padding, dilation, ceil_mode) -> int:
    """Count the windows: in torch the last may start in the input or its left padding, not in the right padding."""
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (-(-span // stride) if ceil_mode else span // stride) + 1
    return count - 1 if ceil_mode and (count - 1) * stride >= size + padding else count


def _lowest(dtype):
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _window_pads(x, rank, kernel, stride, padding, dilation, ceil_mode):
    """Return output sizes, and (before, after) per axis so that windows exactly cover; `after` may crop."""
    sizes, pads = [], []
    for size, k, s, p, d in zip(x.shape[-rank:], kernel, stride, padding, dilation, strict=True):
        count = _output_size(size, k, s, p, d, ceil_mode)
        sizes.append(count)
        pads.append((p, (count - 1) * s + d * (k - 1) + 1 - size - p, 0))
    return sizes, [(0, 0, 0)] * (x.ndim - rank) + pads


def _max_pool_with_indices(rank: int):
    def lower(call, x, kernel_size, stride=(), padding: Size = 0, dilation: Size = 1, ceil_mode=False):
        """Return the maxima, and their positions in the flattened space of x."""
        kernel = _fit(kernel_size, rank)
        stride, padding, dilation = _fit(stride, rank, kernel), _fit(padding, rank), _fit(dilation, rank)
        sizes, pads = _window_pads(x, rank, kernel, stride, padding, dilation, ceil_mode)
        if math.prod(kernel) <= MOST_ENTRIES:
            return _maximum_by_entries(x, pads, sizes, kernel, stride, padding, dilation)
        positions = [
            np.arange(count)[:, None] * s - p + np.arange(k) * d
            for count, k, s, p, d in zip(sizes, kernel, stride, padding, dilation, strict=True)
        ]
        return _pick_maximum(x, positions)

    return lower


def _max_pool(rank: int):
    with_indices = _max_pool_with_indices(rank)

    def lower(call, x, kernel_size, stride=(), padding=0, dilation=1, ceil_mode=False):
        kernel = _fit(kernel_size, rank)
        stride, padding, dilation = _fit(stride, rank, kernel), _fit(padding, rank), _fit(dilation, rank)
        if math.prod(kernel) <= MOST_ENTRIES or max(dilation) > 1:  # reduce_window has no gradient then
            return with_indices(call, x, kernel, stride, padding, dilation, ceil_mode)[0]
        _, pads = _window_pads(x, rank, kernel, stride, padding, dilation, ceil_mode)
        lowest = np.asarray(_lowest(x.dtype), x.dtype)
        lead = (1,) * (x.ndim - rank)
        return jax.lax.reduce_window(
            jax.lax.pad(x, lowest, pads),
            lowest,
            jax.lax.max,
            (*lead, *kernel),
            (*lead, *stride),
            "VALID",
            window_dilation=(*lead, *dilation),
        )

    return lower


for _rank in (1, 2, 3):
    lowering(f"max_pool{_rank}d.default")(_max_pool(_rank))


for _rank in (2, 3):
    lowering(f"max_pool{_rank}d_with_indices.default")(_max_pool_with_indices(_rank))


def _maximum_by_entries(x, pads, sizes, kernel, stride, padding, dilation):
    """Do as `_pick_maximum`, entry by entry over all windows at once: a gather's gradient is slow on a CPU.

    The first of equal maxima and the last NaN win, as in torch.
    """
    rank = len(kernel)
    padded = jax.lax.pad(x, np.asarray(_lowest(x.dtype), x.dtype), pads)
    best, where = None, np.zeros((), np.int32)
    for entry in np.ndindex(*kernel):
        starts = [0] * (x.ndim - rank) + [o * d for o, d in zip(entry, dilation, strict=True)]
        spans = [*x.shape[: x.ndim - rank], *((n - 1) * s + 1 for n, s in zip(sizes, stride, strict=True))]
        ends = [start + span for start, span in zip(starts, spans, strict=True)]
        values = jax.lax.slice(padded, starts, ends, [1] * (x.ndim - rank) + list(stride))
        place = np.zeros((), np.int32)
        for axis, (o, count) in enumerate(zip(entry, sizes, strict=True)):
            index = np.arange(count) * stride[axis] - padding[axis] + o * dilation[axis]
            first = index % dilation[axis]  # the first inside, if the window begins in the padding
            index = np.where(index < 0, first, np.minimum(index, x.shape[x.ndim - rank + axis] - 1))
            place = place * x.shape[x.ndim - rank + axis] + index.reshape(-1, *[1] * (rank - 1 - axis))
        place = np.broadcast_to(place, sizes).astype(np.int32)
        if best is None:
            best, where = values, jnp.broadcast_to(place, values.shape)
            continue
        better = values > best
        if jnp.issubdtype(x.dtype, jnp.floating):
            better = better | jnp.isnan(values)
        best, where = jnp.where(better, values, best), jnp.where(better, place, where)
    return best, where


def _pick_maximum(x, positions):
    """Return maxima and their positions. positions: per axis [window, entry]; those outside the input don't count."""
    rank = len(positions)
    space = x.shape[-rank:]
    flat = np.zeros((), int)
    inside = np.ones((), bool)
    for axis, (index, size) in enumerate(zip(positions, space, strict=True)):
        shape = [1] * (2 * rank)
        shape[axis], shape[rank + axis] = index.shape
        flat = flat * size + np.clip(index, 0, size - 1).reshape(shape)
        inside = inside & ((index >= 0) & (index < size)).reshape(shape)
    windows = tuple(len(index) for index in positions)
    flat = np.broadcast_to(flat, inside.shape).reshape(*windows, -1)
    inside = inside.reshape(*windows, -1)
    values = x.reshape(*x.shape[:-rank], -1)[..., flat]
    values = jnp.where(inside, values, _lowest(x.dtype))
    best = jnp.argmax(values, axis=-1, keepdims=True)
    where = jnp.take_along_axis(jnp.broadcast_to(flat, values.shape), best, axis=-1)[..., 0]
    return jnp.take_along_axis(values, best, axis=-1)[..., 0], where.astype(jnp.int32)


def _max_unpool(rank: int):
    def lower(call, x, indices, output_size, *_):
        """Write every element of x at its place in zeros; each takes its gradient from there, also where several
        meet."""
        places = indices.reshape(-1, math.prod(x.shape[-rank:]))
        rows = np.arange(places.shape[0])[:, None]
        size = math.prod(output_size)

        @jax.custom_vjp
        def unpool(x, places):
            return jnp.zeros((places.shape[0], size), x.dtype).at[rows, places].set(x)

        unpool.defvjp(
            lambda x, places: (unpool(x, places), places),
            lambda places, slope: (jnp.take_along_axis(slope, places, 1, mode="clip"), None),
        )
        return unpool(x.reshape(places.shape), places).reshape(*x.shape[:-rank], *output_size)

    return lower


for _rank in (2, 3):
    lowering(f"max_unpool{_rank}d.default")(_max_unpool(_rank))


def _avg_pool(rank: int):
    def lower(
        call,
        x,
        kernel_size,
        stride=(),
        padding=0,
        ceil_mode=False,
        count_include_pad=True,
        divisor_override=None,
    ):
        kernel = _fit(kernel_size, rank)
        stride, padding = _fit(stride, rank, kernel), _fit(padding, rank)
        sizes, pads = _window_pads(x, rank, kernel, stride, padding, [1] * rank, ceil_mode)
        lead = (1,) * (x.ndim - rank)
        y = wide(x)
        total = jax.lax.reduce_window(
            jax.lax.pad(y, np.zeros((), y.dtype), pads),
            np.zeros((), y.dtype),
            jax.lax.add,
            (*lead, *kernel),
            (*lead, *stride),
            "VALID",
        )
        if divisor_override:
            return (total / divisor_override).astype(x.dtype)
        divisor = np.ones((), np.float32)
        for count, size, k, s, p in zip(sizes, x.shape[-rank:], kernel, stride, padding, strict=True):
            start = np.arange(count) * s - p
            end = np.minimum(start + k, size + p)
            if not count_include_pad:
                start, end = np.maximum(start, 0), np.minimum(end, size)
            divisor = divisor[..., None] * (end - start)
        return (total / divisor.astype(np.float32)).astype(x.dtype)

    return lower


for _rank in (1, 2, 3):
    lowering(f"avg_pool{_rank}d.default")(_avg_pool(_rank))


def _adaptive_edges(size: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(count) * size // count, -(-(np.arange(count) + 1) * size // count)


def _adaptive_avg_pool(rank: int):
    def lower(call, x, output_size):
        """Average each axis by a matrix of its own."""
        y = wide(x)
        for axis, count in enumerate(_fit(output_size, rank)):
            axis = x.ndim - rank + axis
            size = x.shape[axis]
            if count == 1:
                y = jnp.mean(y, axis, keepdims=True)
            elif count != size:
                start, end = _adaptive_edges(size, count)
                entry = np.arange(size)
                inside = (entry >= start[:, None]) & (entry < end[:, None])
                matrix = (inside / (end - start)[:, None]).astype(np.float32)
                y = jnp.moveaxis(jnp.tensordot(y, matrix.astype(y.dtype), ((axis,), (1,))), -1, axis)
        return y.astype(x.dtype)

    return lower


for _rank in (1, 2, 3):
    lowering(f"adaptive_avg_pool{_rank}d.default")(_adaptive_avg_pool(_rank))
    if _rank > 1:
        lowering(f"_adaptive_avg_pool{_rank}d.default")(_adaptive_avg_pool(_rank))


def _adaptive_max_pool(rank: int):
    def lower(call, x, output_size):
        positions = []
        for size, count in zip(x.shape[-rank:], _fit(output_size, rank), strict=True):
            start, end = _adaptive_edges(size, count)
            index = start[:, None] + np.arange((end - start).max())
            positions.append(np.where(index < end[:, None], index, -1))
        return _pick_maximum(x, positions)

    return lower


for _rank in (1, 2, 3):
    lowering(f"adaptive_max_pool{_rank}d.default")(_adaptive_max_pool(_rank))


def _fractional_max_pool(rank: int):
    def lower(call, x, kernel_size, output_size, random_samples):
        """Pool windows whose places the samples [batch, channel, axis] shift; for images the last axis comes first."""
        batched = x if x.ndim == rank + 2 else x[None]
        space, lead = batched.shape[2:], batched.shape[:2]
        flat = jnp.zeros((*lead, *(1,) * (2 * rank)), jnp.int32)
        each = zip(space, _fit(kernel_size, rank), _fit(output_size, rank), strict=True)
        for axis, (size, kernel, count) in enumerate(each):
            shift = random_samples[..., rank - 1 - axis if rank == 2 else axis, None]
            step = (size - kernel) / (count - 1) if count > 1 else 0.0
            start = ((jnp.arange(count) + shift) * step).astype(jnp.int32) - (shift * step).astype(jnp.int32)
            start = start.at[..., -1].set(size - kernel)
            index = start[..., None] + np.arange(kernel)
            shape = [*lead, *(1,) * (2 * rank)]
            shape[2 + axis], shape[2 + rank + axis] = count, kernel
            flat = flat * size + index.reshape(shape)
        windows = flat.shape[2 : 2 + rank]
        flat = flat.reshape(*lead, -1, math.prod(flat.shape[2 + rank :]))
        values = jnp.take_along_axis(batched.reshape(*lead, 1, -1), flat, axis=-1, mode="clip")
        best = jnp.argmax(values, -1, keepdims=True)
        pick = lambda source: jnp.take_along_axis(source, best, -1).reshape(*lead, *windows)
        result = pick(values), pick(flat)
        return result if x.ndim == rank + 2 else tuple(value[0] for value in result)

    return lower


for _rank in (2, 3):
    lowering(f"fractional_max_pool{_rank}d.default")(_fractional_max_pool(_rank))


@lowering("max_pool2d_with_indices_backward.default")
def max_pool2d_backward(call, slope, x, kernel_size, stride, padding, dilation, ceil_mode, indices):
    """Add every slope at the place that its window's maximum came from."""
    places = indices.reshape(math.prod(indices.shape[:-2]), -1)
    rows = np.arange(places.shape[0])[:, None]
    flat = jnp.zeros((places.shape[0], math.prod(x.shape[-2:])), slope.dtype)
    return flat.at[rows, places].add(slope.reshape(places.shape)).reshape(x.shape)
