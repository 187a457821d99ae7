"""Sizes of selections, and operators that keep every row apart."""

import math
import operator
from typing import Any

import sympy
import torch

from torch_bridge.lowering.selections.values import Length, Lengths, Site, data_axes, plain, run, shape_of, value_of


def _run_with_shapes(site: Site, *args, **kwargs):
    return site.result(site.lower(plain(args, True), plain(kwargs, True)))


def compute_size(node: Any, args: tuple, lengths: Lengths) -> Any:
    """Arithmetic of Python's on sizes, and picking from a tuple."""
    if node.target is operator.getitem:
        return args[0][args[1]]
    value = node.target(*plain(args))
    if node.target is operator.mul:
        return Length(value, lengths, node.target(*plain(args, True)))
    return value


ON_SIZES = {getattr(operator, name) for name in "add sub mul floordiv truediv mod neg pow eq ne lt le gt ge".split()}


def length_of(site: Site, x, dim=None):
    """sym_size and sym_numel."""
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
    """Operators whose first axis is a batch of independent samples."""
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
    """Queries, keys and values of a batch whose size the data decides."""
    given = [value_of(n) for n in node.all_input_nodes]
    return run if all(set(data_axes(v)) <= set(range(v.dim() - 2)) for v in given) else None


def find_embedding(node):
    return run if not data_axes(value_of(node.args[0])) else None


def find_view(node):
    """Axes may be split and joined as long as the rows stay together at the front."""
    given, value = value_of(node.args[0]), value_of(node)
    before, after = _fronts(given), _fronts(value)
    return _run_with_shapes if before is not None and before == after else None


def _fronts(value) -> list | None:
    """Count, in elements, what lies before each axis that the data decides."""
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
    """Slices and splits of other axes; along the data's own only the whole of it."""
    value, x = value_of(node), value_of(node.args[0])
    values = value if isinstance(value, (tuple, list)) else [value]
    same = all(isinstance(v, torch.Tensor) and v.dim() == x.dim() for v in values)
    whole = same and all(shape_of(v)[axis] == shape_of(x)[axis] for v in values for axis in data_axes(x))
    return run if whole else None


def find_join(node):
    tensors = [value_of(n) for n in node.args[0]]
    value, x = value_of(node), tensors[0]
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    dim %= value.dim()
    stacked = value.dim() > x.dim()
    if stacked:
        return run if all(shape_of(t) == shape_of(x) for t in tensors) else None
    return (
        run
        if all(dim not in data_axes(t) for t in tensors) and all(data_axes(t) == data_axes(x) for t in tensors)
        else None
    )
