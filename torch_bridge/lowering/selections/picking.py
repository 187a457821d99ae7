"""Operators that make selections, and operators that read or write at positions."""

from typing import Any

import jax
import jax.numpy as jnp
import torch

from torch_bridge.lowering.selections.values import (
    Site,
    data_axes,
    is_row,
    new_symbol,
    plain,
    run,
    shape_of,
    to_front,
    value_of,
)


def _selected(site: Site, array: jax.Array, mask: jax.Array, axis: int = 0) -> Any:
    """Return the node's value: `array` along the axis where mask [array.shape[axis]] is True."""
    symbol = new_symbol(site.node)
    if not symbol:  # torch has proven how many there are
        (order,) = jnp.nonzero(mask, size=int(shape_of(value_of(site.node))[axis]), fill_value=0)
        return jnp.take(array, order, axis=axis)
    taken, count = to_front(array, mask, axis)
    site.lengths = site.lengths | {symbol: (mask.size, count)}
    return site.result(taken)


def _masked(site: Site, mask_node: Any, mask: Any) -> jax.Array:
    """Return a mask that is False beyond the rows of a selection."""
    array = getattr(mask, "array", mask)
    for axis, count in site.counts(value_of(mask_node), array).items():
        array = array & is_row(array, axis, count)
    return array


def find_index(node):
    x, indices = value_of(node.args[0]), node.args[1]
    tensors = [value_of(i) for i in indices if i is not None]
    masks = [t for t in tensors if t.dtype is torch.bool]
    lead = next(place for place, i in enumerate(indices) if i is not None)
    if masks and len(tensors) == 1:
        return _index_by_mask if _counted(node) else None
    if masks:
        lengths = {name for t in tensors for name in data_axes(t).values()}
        known = len(masks) == 1 and masks[0].dim() == 1 and set(data_axes(value_of(node)).values()) <= lengths
        return _index_by_mask_and_numbers if known and not data_axes(x) else None
    axes = {place for place, i in enumerate(indices) if i is not None}
    contiguous = axes == set(range(lead, lead + len(axes)))
    return _index_by_numbers if contiguous or not data_axes(x) else None


def _index_by_mask(site: Site, x, indices):
    lead = next(place for place, index in enumerate(indices) if index is not None)
    mask = _masked(site, site.node.args[1][lead], indices[lead])
    x = getattr(x, "array", x)
    rows = x.reshape(*x.shape[:lead], -1, *x.shape[lead + mask.ndim :])
    return _selected(site, rows, mask.reshape(-1), lead)


def _index_by_mask_and_numbers(site: Site, x, indices):
    """Compute `x[mask, labels[mask]]`: index by a mask, and by as many numbers as it has rows."""
    found = list(plain(indices))
    for place, node in enumerate(site.node.args[1]):
        if node is not None and value_of(node).dtype is torch.bool:
            mask = _masked(site, node, indices[place])
            found[place], _ = to_front(jnp.arange(mask.size, dtype=jnp.int32), mask, 0)
            found[place] = jnp.minimum(found[place], max(mask.size - 1, 0))
    return site.run((x, found), {})


def _index_by_numbers(site: Site, x, indices):
    """Index by numbers; those below 0 count from the last row, not from the last copy."""
    counts = site.counts(value_of(site.node.args[0]), getattr(x, "array", x))
    found = list(plain(indices))
    for axis, count in counts.items():
        if axis < len(found) and found[axis] is not None:
            found[axis] = jnp.where(found[axis] < 0, found[axis] + count, found[axis])
    return site.run((x, found), {})


def masked_select(site: Site, x, mask):
    node = site.node
    array, mask = getattr(x, "array", x), getattr(mask, "array", mask)
    shape = jnp.broadcast_shapes(array.shape, mask.shape)
    mask = jnp.broadcast_to(mask, shape)
    for given in node.args:
        value, lead = value_of(given), len(shape) - value_of(given).dim()
        for axis, symbol in data_axes(value).items():
            most, count = site.lengths[symbol]
            mask = mask & is_row(mask, lead + axis, count * (shape[lead + axis] // max(most, 1)))
    return _selected(site, jnp.broadcast_to(array, shape).reshape(-1), mask.reshape(-1))


def find_masked_scatter(node):
    given, mask = value_of(node.args[0]), value_of(node.args[1])
    return _masked_scatter if not data_axes(given) and not data_axes(mask) else None


def _masked_scatter(site: Site, x, mask, source):
    mask = jnp.broadcast_to(mask, x.shape)
    places = jnp.cumsum(mask.reshape(-1), dtype=jnp.int32).reshape(x.shape) - 1
    rows = source.array.reshape(-1)
    return jnp.where(mask, rows[jnp.clip(places, 0, max(rows.size - 1, 0))].astype(x.dtype), x) if rows.size else x


def nonzero(site: Site, x):
    mask = _masked(site, site.node.args[0], x) if data_axes(value_of(site.node.args[0])) else x
    mask = mask != 0
    places = jnp.stack([p.reshape(-1) for p in jnp.indices(mask.shape)], -1).astype(jnp.int32)
    return _selected(site, places, mask.reshape(-1))


def unique(site: Site, x, sorted=True, return_inverse=False, return_counts=False):
    """Return the numbers in ascending order, as torch does on a CPU."""
    flat = x.reshape(-1)
    values, inverse, counts = jnp.unique(flat, return_inverse=True, return_counts=True, size=flat.size, equal_nan=False)
    count = jnp.max(inverse, initial=-1).astype(jnp.int32) + 1
    site.lengths = site.lengths | {new_symbol(site.node): (flat.size, count)}
    none = jnp.zeros(0, jnp.int32)  # as torch gives what is not asked for
    inverse = inverse.reshape(x.shape).astype(jnp.int32) if return_inverse else none
    parts = [values, inverse, counts.astype(jnp.int32) if return_counts else none]
    return tuple(site.result(parts, again=(0,)))


def find_producer(way):
    def find(node):
        plain = not any(data_axes(value_of(n)) for n in node.all_input_nodes)
        return way if _counted(node) and (plain or way is not unique) else None

    return find


def _counted(node: torch.fx.Node) -> bool:
    """Return True if the node's length is one new symbol, or its sizes are all known numbers."""
    value = value_of(node)
    return bool(new_symbol(node)) or (isinstance(value, torch.Tensor) and all(n.is_number for n in shape_of(value)))


def find_select(node):
    x, dim, index = value_of(node.args[0]), node.args[1], node.args[2]
    if dim % x.dim() not in data_axes(x):
        return run
    return _select if isinstance(index, int) else None


def _select(site: Site, x, dim, index):
    array = x.array
    count = site.counts(value_of(site.node.args[0]), array)[dim % array.ndim]
    place = jnp.maximum(count + index, 0) if index < 0 else index
    return site.result(jnp.take(array, place, axis=dim, mode="clip"))


def find_put(node):
    x, indices = value_of(node.args[0]), node.args[1]
    tensors = [value_of(i) for i in indices if i is not None]
    if any(t.dtype is torch.bool for t in tensors):
        lead = next(place for place, i in enumerate(indices) if i is not None)
        masks = [t for t in tensors if t.dtype is torch.bool]
        if data_axes(x) or any(map(data_axes, masks)):
            return None
        if len(tensors) > 1:
            return _put_by_mask_and_numbers if len(masks) == 1 and masks[0].dim() == 1 else None
        return run if lead == 0 else None
    return _put if not data_axes(x) else None


def _outside(site: Site, index_node: Any, index: Any, size: int) -> jax.Array:
    """Return the positions, with those beyond the rows moved outside the target, where JAX drops writes."""
    array = getattr(index, "array", index)
    array = jnp.where(array < 0, array + size, array)
    for axis, count in site.counts(value_of(index_node), array).items():
        array = jnp.where(is_row(array, axis, count), array, size)
    return array


def _put(site: Site, x, indices, values, accumulate=False):
    nodes, found = site.node.args[1], list(indices)
    for place, index in enumerate(indices):
        if index is not None:
            found[place] = _outside(site, nodes[place], index, x.shape[place])
    return site.run((x, found, values, accumulate), {})


def _put_by_mask_and_numbers(site: Site, x, indices, values, accumulate=False):
    """Write at `x[mask, labels[mask]]`."""
    found = list(indices)
    for place, node in enumerate(site.node.args[1]):
        if node is not None and value_of(node).dtype is torch.bool:
            mask = indices[place]
            (found[place],) = jnp.nonzero(mask, size=mask.size, fill_value=x.shape[place])  # dropped beyond the rows
    return site.run((x, found, values, accumulate), {})


def find_add(node):
    x, dim = value_of(node.args[0]), node.args[1]
    return _add if x.dim() and isinstance(dim, int) else None


def _add(site: Site, x, dim, index, *rest, **kwargs):
    size = getattr(x, "array", x).shape[dim]
    outside = _outside(site, site.node.args[2], index, size)
    return site.run((x, dim, outside, *rest), kwargs, again=tuple(data_axes(value_of(site.node))))


def find_scatter(node):
    x, dim, index = value_of(node.args[0]), node.args[1], value_of(node.args[2])
    if not x.dim():
        return None
    others = [axis for axis in range(x.dim()) if axis != dim % x.dim()]
    same = all(data_axes(x).get(axis) == data_axes(index).get(axis) for axis in others)
    return _add if same or not data_axes(x) else None


def find_gather(node):
    x, dim, index = value_of(node.args[0]), node.args[1], value_of(node.args[2])
    along = dim % max(x.dim(), 1)
    same = all(data_axes(x).get(axis) == data_axes(index).get(axis) for axis in range(x.dim()) if axis != along)
    return run if same else None
