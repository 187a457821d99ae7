"""Sizes of selections, and operators that treat every row on its own."""

import math
import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import sympy
import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from torch_bridge.lowering.dtypes import jax_dtype
from torch_bridge.lowering.operators.symbolic import ON_ARRAYS
from torch_bridge.lowering.selections.values import (
    Length,
    Lengths,
    Site,
    data_axes,
    length_in,
    plain,
    run,
    shape_of,
    size_of,
    symbols_of,
    to_front,
    value_of,
)


def _run_with_shapes(site: Site, *args, **kwargs):
    return site.result(site.lower(plain(args, True), plain(kwargs, True)))


def compute_size(node: Any, args: tuple, lengths: Lengths) -> Any:
    """Compute Python's arithmetic on sizes, or pick from a tuple."""
    if node.target is operator.getitem:
        return args[0][args[1]]
    size = value_of(node)
    if not isinstance(size, torch.SymInt):
        return (ON_ARRAYS.get(node.target) or node.target)(*plain(args))
    on_counts, on_sizes = _EXTREMES.get(node.target, (node.target, node.target))
    value, most = on_counts(*plain(args)), on_sizes(*plain(args, True))
    length = length_in(size_of(size)) if symbols_of(size) else None
    if length is not None and str(length) not in lengths and length == size_of(size):
        lengths = lengths | {str(length): (most, value)}
    return Length(value, lengths, most)


_EXTREMES: dict[Any, tuple[Callable, Callable]] = {torch.sym_max: (jnp.maximum, max), torch.sym_min: (jnp.minimum, min)}
ON_SIZES = {getattr(operator, name) for name in "add sub mul floordiv truediv mod neg pow eq ne lt le gt ge".split()}
ON_SIZES |= set(_EXTREMES)


def length_of(site: Site, x, dim=None):
    """Compute sym_size and sym_numel."""
    counts = site.counts(value_of(site.node.args[0]), x.array)
    axes = range(x.array.ndim) if dim is None else [dim % x.array.ndim]
    most = math.prod(x.array.shape[axis] for axis in axes)
    count = 1
    for axis in axes:
        count = count * counts.get(axis, x.array.shape[axis])
    return Length(count, x.lengths, most) if any(axis in counts for axis in axes) else most


def find_linear(node):
    x, others = value_of(node.args[0]), [value_of(n) for n in node.all_input_nodes[1:]]
    return run if x.dim() - 1 not in data_axes(x) and not any(map(data_axes, others)) else None


def find_batch(node):
    """Accept operators whose first axis is a batch of independent samples."""
    x, value = value_of(node.args[0]), value_of(node)
    values = value if isinstance(value, (tuple, list)) else [value]
    others = [value_of(n) for n in node.all_input_nodes if n is not node.args[0]]
    alone = set(data_axes(x)) == {0} and not any(data_axes(o) for o in others)
    return run if alone and all(set(data_axes(v)) <= {0} for v in values if isinstance(v, torch.Tensor)) else None


def find_norm(node):
    x, shape = value_of(node.args[0]), node.args[1]
    own = set(range(x.dim() - len(shape), x.dim()))
    others = [value_of(n) for n in node.all_input_nodes if n is not node.args[0]]
    return run if not own & set(data_axes(x)) and not any(map(data_axes, others)) else None


def find_attention(node):
    """Accept queries, keys and values whose batch axes alone have sizes that the data decides."""
    given = [value_of(n) for n in node.all_input_nodes]
    return run if all(set(data_axes(v)) <= set(range(v.dim() - 2)) for v in given) else None


def find_embedding(node):
    return run if not data_axes(value_of(node.args[0])) else None


def find_view(node):
    """Accept views that split and join axes as long as the rows stay together at the front."""
    given, value = value_of(node.args[0]), value_of(node)
    before, after = _fronts(given), _fronts(value)
    return _run_with_shapes if before is not None and before == after else None


def _fronts(value) -> list | None:
    """Return, for each axis that the data decides, its length's name and how many elements lie before it."""
    found, front = [], sympy.Integer(1)
    axes = data_axes(value)
    for axis, size in enumerate(shape_of(value)):
        if axis in axes:
            found.append((axes[axis], front))
            front = sympy.Integer(1)
        else:
            front *= size
    return found


def find_expand(node):
    value, given = value_of(node), value_of(node.args[0])
    lead = value.dim() - given.dim()
    kept = all(shape_of(value)[lead + axis] == shape_of(given)[axis] for axis in data_axes(given))
    return _run_with_shapes if kept else None


def find_creation(node):
    return _full if str(node.target).startswith("aten.full.") else _run_with_shapes


def _full(site: Site, shape, number, **kwargs):
    return site.result(site.lower((plain(shape, True), plain(number)), kwargs))


def find_moved(node):
    return run


def find_cut(node):
    """Accept slices and splits of other axes; along an axis that the data decides, slices between fixed places."""
    value, x = value_of(node), value_of(node.args[0])
    values = value if isinstance(value, (tuple, list)) else [value]
    same = all(isinstance(v, torch.Tensor) and v.dim() == x.dim() for v in values)
    if same and all(shape_of(v)[axis] == shape_of(x)[axis] for v in values for axis in data_axes(x)):
        return run
    if str(node.target) != "aten.slice.Tensor":
        return None
    return _slice if _is_fixed(node) else _slice_at if _is_at(node) else None


def _is_fixed(node) -> bool:
    """Return True if a slice has places that Python knows, and its length has a symbol of its own."""
    if not all(isinstance(place, int) or place is None for place in node.args[1:]):
        return False
    size = shape_of(value_of(node))[node.args[1] if len(node.args) > 1 else 0]
    return bool(free_unbacked_symbols(size)) and length_in(size) == size


def _slice(site: Site, x, dim=0, start=None, end=None, step=1):
    """Slice rows; places below 0 count from the last row."""
    axis, array = dim % x.array.ndim, x.array
    size = array.shape[axis]
    count = site.counts(value_of(site.node.args[0]), array)[axis]
    most = len(range(size)[start:end:step])
    place = lambda at: jnp.clip(count + at if at < 0 else at, 0, count)
    first = place(start or 0)
    last = count if end is None or end >= size else place(end)
    rows = jnp.maximum(-((first - last) // step), 0)
    places = jnp.where(jnp.arange(most) < rows, first + jnp.arange(most) * step, first)
    site.lengths = site.lengths | {data_axes(value_of(site.node))[axis]: (most, rows)}
    return site.result(jnp.take(array, jnp.minimum(places, max(size - 1, 0)), axis=axis))


def _is_at(node) -> bool:
    """Return True if a slice of the first rows, or after others, has one length of a selection."""
    dim, start = (*node.args[1:3], *(0, 0)[len(node.args) - 1 :])[:2]
    forwards = start is None or isinstance(start, torch.fx.Node) or (isinstance(start, int) and start >= 0)
    return forwards and len(node.args) < 5 and length_in(shape_of(value_of(node))[dim]) is not None


def _slice_at(site: Site, x, dim=0, start=0, end=None):
    """Slice rows between places that are lengths of selections: the gradient of a part of torch.cat."""
    axis, array = dim % getattr(x, "array", x).ndim, getattr(x, "array", x)
    first, value = 0 if start is None else plain((start,))[0], value_of(site.node)
    most, rows = site.lengths[data_axes(value)[axis]]
    size = shape_of(value)[axis]
    times = int(size / length_in(size))
    places = first + jnp.where(jnp.arange(most * times) < rows * times, jnp.arange(most * times), 0)
    return site.result(jnp.take(array, jnp.minimum(places, max(array.shape[axis] - 1, 0)), axis=axis))


def find_slice_scatter(node):
    """Accept the gradient of rows between fixed places."""
    x, dim, places = value_of(node.args[0]), (*node.args[2:3], 0)[0], node.args[3:]
    if dim % x.dim() not in data_axes(x):
        return run
    return _slice_scatter if all(isinstance(place, int) or place is None for place in places) else None


def _slice_scatter(site: Site, x, source, dim=0, start=None, end=None, step=1):
    axis, array = dim % x.array.ndim, x.array
    rows = getattr(source, "array", source)
    size, most = array.shape[axis], rows.shape[axis]
    count = site.counts(value_of(site.node.args[0]), array)[axis]
    first = jnp.clip((count if (start or 0) < 0 else 0) + (start or 0), 0, count)
    number = site.counts(value_of(site.node.args[1]), rows).get(axis, most)
    places = jnp.where(jnp.arange(most) < number, first + jnp.arange(most) * step, size)
    index = (*[slice(None)] * axis, places)
    return site.result(array.at[index].set(rows.astype(array.dtype), mode="drop"))


def find_diagonal(node):
    """Accept the diagonal of a square whose height and width are the same length that the data decides."""
    x = value_of(node.args[0])
    return _diagonal if x.dim() == 2 and len(node.args) == 1 and len(set(data_axes(x).values())) == 1 else None


def _diagonal(site: Site, x):
    count = site.counts(value_of(site.node.args[0]), x.array)[0]
    site.lengths = site.lengths | {data_axes(value_of(site.node))[0]: (x.array.shape[0], count)}
    return site.run((x,), {})


def find_join(node):
    tensors = [value_of(n) for n in node.args[0]]
    value, x = value_of(node), tensors[0]
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    dim %= value.dim()
    stacked = value.dim() > x.dim()
    if stacked:
        return run if all(shape_of(t) == shape_of(x) for t in tensors) else None
    if not all(t.dim() == value.dim() for t in tensors):
        return None
    others = [{axis: name for axis, name in data_axes(t).items() if axis != dim} for t in tensors]
    if any(other != others[0] for other in others):
        return None
    if all(dim not in data_axes(t) for t in tensors):
        return run
    size = shape_of(value)[dim]
    return _joined(dim) if (size / length_in(size)).is_integer else None


def _joined(dim: int):
    """Return a way to join along an axis that the data decides: the rows of all arrays come first."""

    def way(site: Site, tensors, *_):
        value, nodes = value_of(site.node), site.node.args[0]
        arrays = [array.astype(jax_dtype(value.dtype)) for array in plain(tensors)]
        masks = []
        for node, array in zip(nodes, arrays, strict=True):
            counts = site.counts(value_of(node), array)
            masks.append(jnp.arange(array.shape[dim]) < counts.get(dim, array.shape[dim]))
        mask = jnp.concatenate(masks)
        array, count = to_front(jnp.concatenate(arrays, dim), mask, dim)
        size = shape_of(value)[dim]
        times = int(size / length_in(size))
        site.lengths = {data_axes(value)[dim]: (mask.size // times, count // times)} | site.lengths
        return site.result(array)

    return way


def flip(site: Site, x, dims):
    array = x.array
    counts = site.counts(value_of(site.node.args[0]), array)
    for axis in (dim % array.ndim for dim in dims):
        size = array.shape[axis]
        array = jnp.take(array, jnp.maximum(counts.get(axis, size) - 1 - jnp.arange(size), 0), axis=axis)
    return site.result(array, again=tuple(counts))
