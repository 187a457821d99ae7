"""Selections: rows that the data chose, at the front of an array of the greatest length that they can have."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import sympy
import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import Max, Min

Lengths = dict[str, tuple[int, Any]]  # torch's symbol, or a sum of such -> (greatest length, number of rows)


@jax.tree_util.register_pytree_node_class
class Selection:
    """Array of the greatest possible length along the axes that the data decides. lengths: by torch's symbol."""

    def __init__(self, array: jax.Array, lengths: Lengths):
        self.array, self.lengths = array, lengths

    def tree_flatten(self):
        names = tuple(sorted(self.lengths))
        return (self.array, *(self.lengths[n][1] for n in names)), tuple((n, self.lengths[n][0]) for n in names)

    @classmethod
    def tree_unflatten(cls, known, children):
        array, *counts = children
        return cls(array, {name: (most, count) for (name, most), count in zip(known, counts, strict=True)})


@jax.tree_util.register_pytree_node_class
class Length(Selection):
    """Size of a selection: `most` where it is part of a shape, the number of rows where it is computed with."""

    def __init__(self, array: Any, lengths: Lengths, most: int = 0):
        super().__init__(array, lengths)
        self.most = most

    def tree_flatten(self):
        children, known = super().tree_flatten()
        return children, (known, self.most)

    @classmethod
    def tree_unflatten(cls, known, children):
        inner = Selection.tree_unflatten(known[0], children)
        return cls(inner.array, inner.lengths, known[1])


class Site:
    """One node, with the lengths that its arguments have."""

    def __init__(self, node: torch.fx.Node, lengths: Lengths, lower: Callable):
        self.lengths, self.lower = lengths, lower
        self.node: Any = node  # whose arguments are anything that fx holds

    def counts(self, value: Any, array: jax.Array) -> dict[int, Any]:
        """Return axis -> number of rows, for an array that has the shape of `value`."""
        found = {}
        for axis, symbol in data_axes(value).items():
            most, count = self.lengths[symbol]
            found[axis] = count * (array.shape[axis] // max(most, 1))
        return found

    def filled(self, index: int, array: Any, number: Any, axes: Iterable[int] | None = None) -> Any:
        """Return the node's index-th argument with `number` beyond the rows of these axes, or of all if left out."""
        counts = self.counts(value_of(self.node.args[index]), array)
        for axis, count in counts.items():
            if axes is None or axis in axes:
                array = jnp.where(is_row(array, axis, count), array, jnp.asarray(number, array.dtype))
        return array

    def result(self, arrays: Any, again: Sequence[int] = ()) -> Any:
        """Return the node's value from plain arrays. again: axes with copies of the first row beyond the rows."""
        value = self.node.meta.get("val")
        if isinstance(arrays, (tuple, list)):
            return type(arrays)(self._one(a, v, again) for a, v in zip(arrays, value, strict=True))
        return self._one(arrays, value, again)

    def _one(self, array: Any, value: Any, again: Sequence[int]) -> Any:
        if not isinstance(value, torch.Tensor) or not data_axes(value):
            return array
        for axis, count in self.counts(value, array).items():
            if axis in again:
                first = jax.lax.stop_gradient(jax.lax.slice_in_dim(array, 0, 1, axis=axis))
                array = jnp.where(is_row(array, axis, count), array, first)
        names = set(data_axes(value).values())
        return Selection(array, {name: length for name, length in self.lengths.items() if name in names})

    def run(self, args: tuple, kwargs: Mapping[str, Any], again: Sequence[int] = ()) -> Any:
        """Run the operator's own lowering on the whole arrays."""
        return self.result(self.lower(plain(args), plain(kwargs)), again)


def is_row(array: jax.Array, axis: int, count: Any) -> jax.Array:
    shape = tuple(-1 if a == axis else 1 for a in range(array.ndim))
    return (jnp.arange(array.shape[axis]) < count).reshape(shape)


def leaves(values: Any) -> Iterator[Any]:
    for value in values.values() if isinstance(values, Mapping) else values:
        if isinstance(value, (tuple, list, Mapping)):
            yield from leaves(value)
        else:
            yield value


def plain(values: Any, shapes: bool = False) -> Any:
    """Return arguments as a lowering takes them. shapes: lengths are sizes of a shape."""
    if isinstance(values, Mapping):
        return {name: plain(value, shapes) for name, value in values.items()}
    if isinstance(values, (tuple, list)):
        return (list if isinstance(values, list) else tuple)(plain(value, shapes) for value in values)
    if isinstance(values, Length) and shapes:
        return values.most
    return values.array if isinstance(values, Selection) else values


def shape_symbols(node: torch.fx.Node) -> set:
    """Return the symbols that the data decides in the shapes of the node's tensors."""
    tensors = [value for value in pytree.tree_leaves(value_of(node)) if isinstance(value, torch.Tensor)]
    return set().union(*(symbols_of(size) for tensor in tensors for size in tensor.shape))


def value_of(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, torch.fx.Node) else node


def symbols_of(size: Any) -> set:
    return set(free_unbacked_symbols(size)) if isinstance(size, torch.SymInt) else set()


def data_axes(value: Any) -> dict[int, str]:
    """Return axis -> the name of the length that its size is a multiple of: a symbol, or a sum of several for joined
    selections; "" for anything else."""
    found = {}
    for axis, size in enumerate(getattr(value, "shape", ())):
        if symbols_of(size):
            found[axis] = str(length_in(size_of(size)) or "")
    return found


@functools.lru_cache(maxsize=4096)
def length_in(size: sympy.Expr) -> sympy.Expr | None:
    """Return the one factor of a size that the data decides; None if there are several."""
    symbols = free_unbacked_symbols(size)
    if len(symbols) == 1:
        (symbol,) = symbols
        if not free_unbacked_symbols(sympy.sympify(size / symbol)):
            return symbol
    try:
        factors = [(factor, power) for factor, power in sympy.factor_list(size)[1] if free_unbacked_symbols(factor)]
    except sympy.PolynomialError:
        return None
    return factors[0][0] if len(factors) == 1 and factors[0][1] == 1 else None


def to_front(array: jax.Array, mask: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Return the elements along an axis where mask [array.shape[axis]] is True, then copies of the first; and their
    number. If there are none, the elements are ones, which do no harm."""
    count = jnp.sum(mask, dtype=jnp.int32)
    order = jnp.nonzero(mask, size=mask.size, fill_value=0)[0].astype(jnp.int32)
    order = jnp.where(jnp.arange(mask.size) < count, order, order[0] if mask.size else 0)
    taken = jnp.take(array, order, axis=axis)
    return jnp.where(count > 0, taken, jnp.ones((), array.dtype)), count


def size_of(size: Any) -> Any:
    return _simplest(size.node.expr) if isinstance(size, torch.SymInt) else sympy.Integer(int(size))


@functools.lru_cache(maxsize=4096)
def _simplest(size: sympy.Expr) -> Any:
    """Write `max(0, n - min(k, n))`, the size of x[k:], as the size of x[:-k] is written: max(0, n - k)."""
    if isinstance(size, Max) and len(size.args) == 2 and 0 in size.args:
        (rest,) = (argument for argument in size.args if argument != 0)
        for least in rest.atoms(Min):
            if rest + least in least.args:
                (other,) = (argument for argument in least.args if argument != rest + least)
                return Max(0, rest + least - other)
    return size


def shape_of(value: Any) -> list:
    return [size_of(size) for size in value.shape]


def axes_of_dim(x: torch.Tensor, dim: Any) -> set[int]:
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return set(range(x.dim()))
    return {d % max(x.dim(), 1) for d in ([dim] if isinstance(dim, int) else dim)}


def unbacked(size: Any) -> bool:
    return bool(free_unbacked_symbols(size))


def new_symbol(node: torch.fx.Node) -> str:
    """Return the symbol of the one axis whose size the node finds out; "" if there is not exactly one."""
    values = value_of(node)
    value = values if isinstance(values, torch.Tensor) else values[0]
    before = {name for n in node.all_input_nodes for name in data_axes(value_of(n)).values()}
    new = [name for name in data_axes(value).values() if name not in before]
    return new[0] if len(new) == 1 else ""


def run(site: Site, *args, **kwargs):
    return site.run(args, kwargs)
