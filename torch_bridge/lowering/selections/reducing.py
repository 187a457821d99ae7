"""Operators that reduce an axis whose length the data decides, or pick extremes along it."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from torch_bridge.lowering.dtypes import jax_dtype, real_dtype, wide
from torch_bridge.lowering.operators.derivatives import sloped, zero_where
from torch_bridge.lowering.selections.values import Site, axes_of_dim, data_axes, is_row, plain, run, shape_of, value_of


def find_along(position: int, way: Callable | None):
    """Return a finder for operators along the axes that the argument at `position` names: it picks `way` along those
    that the data decides, `run` along others."""

    def find(node):
        x = value_of(node.args[0])
        if not isinstance(x, torch.Tensor):
            return None
        dim = node.args[position] if len(node.args) > position else node.kwargs.get("dim")
        dim = None if isinstance(dim, bool) else dim  # std.default's second argument is no axis
        if not all(
            isinstance(d, int) for d in ([] if dim is None else dim if isinstance(dim, (list, tuple)) else [dim])
        ):
            return None
        others = [value_of(n) for n in node.all_input_nodes if n is not node.args[0]]
        if any(data_axes(other) and not data_axes(x) for other in others if isinstance(other, torch.Tensor)):
            return None
        return way if axes_of_dim(x, dim) & set(data_axes(x)) else run

    return find


def filling(number: Callable[[Any], Any], again: bool = False, empty_is_nan: bool = False) -> Callable:
    """Return a way that runs the operator with `number(dtype)` beyond the rows."""

    def way(site: Site, x, *args, **kwargs):
        array = site.filled(0, x.array, number(x.array.dtype))
        result = site.run((array, *args), kwargs, again=tuple(range(array.ndim)) if again else ())
        if not empty_is_nan:
            return result
        none = math.prod(site.counts(value_of(site.node.args[0]), x.array).values()) == 0
        nan = lambda y: jnp.where(none, jnp.nan, y) if jnp.issubdtype(y.dtype, jnp.floating) else y
        return jax.tree.map(nan, result)

    return way


def lowest(dtype):
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min if dtype != jnp.bool_ else False


def highest(dtype):
    return jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max if dtype != jnp.bool_ else True


def find_middle(node):
    return find_along(1, middle)(node) if len(data_axes(value_of(node.args[0]))) == 1 else None


def middle(site: Site, x, *args, **kwargs):
    """Compute median, with as many lowest as highest numbers beyond the rows, so that the middle one stays."""
    array = x.array
    ((axis, count),) = site.counts(value_of(site.node.args[0]), array).items()
    each = 1 if args else array.size // max(array.shape[axis], 1)  # elements of a row that count together
    low = (array.shape[axis] * each - 1) // 2 - (count * each - 1) // 2
    beyond = (jnp.arange(array.shape[axis]) - count).reshape(tuple(-1 if a == axis else 1 for a in range(array.ndim)))
    if each == 1:
        least = beyond < low
    else:
        place = jnp.cumsum(jnp.broadcast_to(beyond >= 0, array.shape).reshape(-1)).reshape(array.shape) - 1
        least = place < low
    fill = jnp.where(
        least, jnp.asarray(lowest(array.dtype), array.dtype), jnp.asarray(highest(array.dtype), array.dtype)
    )
    result = site.run((jnp.where(beyond < 0, array, fill), *args), kwargs)
    nan = lambda y: jnp.where(count == 0, jnp.nan, y) if jnp.issubdtype(y.dtype, jnp.floating) else y
    return jax.tree.map(nan, result)


def _number_of(site: Site, index: int, array: jax.Array, axes: Iterable[int]) -> Any:
    """Return how many elements the index-th argument has along these axes."""
    counts = site.counts(value_of(site.node.args[index]), array)
    number = 1
    for axis in axes:
        number = number * counts.get(axis, array.shape[axis])
    return number


def mean(site: Site, x, dim=None, keepdim=False, *, dtype=None):
    axes = tuple(axes_of_dim(value_of(site.node.args[0]), dim))
    array = x.array if dtype is None else x.array.astype(jax_dtype(dtype))
    total = jnp.sum(wide(site.filled(0, array, 0)), axes, keepdims=keepdim)
    return site.result((total / _number_of(site, 0, array, axes)).astype(array.dtype))


def _moments(site: Site, x, dim, correction, keepdim) -> tuple[jax.Array, jax.Array]:
    axes = tuple(axes_of_dim(value_of(site.node.args[0]), dim))
    array, number = wide(x.array), _number_of(site, 0, x.array, axes)
    mean = jnp.sum(site.filled(0, array, 0), axes, keepdims=True) / number
    squares = jnp.sum(site.filled(0, jnp.square(array - mean), 0), axes, keepdims=keepdim)
    variance = squares / jnp.maximum(number - correction, 0)
    return variance, mean if keepdim else mean.reshape(variance.shape)


def spread(root: bool, with_mean: bool) -> Callable:
    """Return a way for var or std of real numbers, with torch's derivative."""

    def way(site: Site, x, dim=None, unbiased=True, keepdim=False, *, correction=None):
        if str(site.node.target).endswith(".default") and isinstance(dim, bool):
            dim, unbiased = None, dim
        variance, mean = _moments(site, x, dim, float(unbiased) if correction is None else correction, keepdim)
        if root:
            value = jnp.sqrt(jax.lax.stop_gradient(variance))
            slope = zero_where(value == 0, 0.5 / jnp.where(value == 0, 1, value))
            variance = sloped(value, (variance, slope))
        value = variance.astype(real_dtype(x.array))
        return site.result((value, mean.astype(x.array.dtype)) if with_mean else value)

    return way


def find_loss(node):
    """Find the way for a loss of two tensors with a reduction: 1 is the mean, 2 the sum."""
    arguments = [a.name for a in node.target._schema.arguments]
    place = arguments.index("reduction")
    reduction = node.args[place] if len(node.args) > place else node.kwargs.get("reduction", 1)
    x = value_of(node.args[0])
    for given in (value_of(n) for n in node.all_input_nodes):
        if shape_of(given) != shape_of(x) and (data_axes(given) or len(shape_of(given)) > 1):
            return None
    if reduction == 0:
        return run

    def way(site: Site, *args, **kwargs):
        args, kwargs = list(plain(args)), dict(plain(kwargs))
        if len(args) > place:
            args[place] = 0
        else:
            kwargs["reduction"] = 0
        values = site.filled(0, site.lower(tuple(args), kwargs), 0)
        total = jnp.sum(values)
        return total if reduction == 2 else total / _number_of(site, 0, values, range(values.ndim))

    return way


def find_nll(node):
    x, target = value_of(node.args[0]), value_of(node.args[1])
    ahead = {axis for axis in data_axes(x) if axis != 1}
    return _nll if ahead == set(data_axes(x)) == set(data_axes(target)) == {0} else None


def _nll(site: Site, x, target, weight, reduction, ignore_index):
    """Compute nll_loss, with the ignored class as target beyond the rows."""
    labels = target.array
    return site.run((x, site.filled(1, labels, ignore_index), weight, reduction, ignore_index), {})


def find_product(contracted: tuple[int, int], first: int = 0):
    """Return a finder for products of the arguments `first` and `first + 1`, which are summed along these axes."""

    def find(node):
        sums = []
        for place, axis in enumerate(contracted):
            value = value_of(node.args[first + place])
            axis = axis % value.dim() if value.dim() > 1 else 0
            if axis in data_axes(value):
                sums.append((first + place, axis))
        if first and data_axes(value_of(node.args[0])) and not _aligned_bias(node):
            return None

        def way(site: Site, *args, **kwargs):
            args = list(plain(args))
            for place, axis in sums:
                args[place] = site.filled(place, args[place], 0, [axis])
            return site.run(tuple(args), kwargs)

        return way

    return find


def _aligned_bias(node) -> bool:
    given, wanted = shape_of(value_of(node.args[0]))[::-1], shape_of(value_of(node))[::-1]
    return all(size in (other, 1) for size, other in zip(given, wanted, strict=False))


def find_einsum(node):
    if not isinstance(node.args[0], str) or "..." in node.args[0] or "->" not in node.args[0]:
        return None
    given, result = node.args[0].replace(" ", "").split("->")
    names = given.split(",")

    def way(site: Site, equation, operands, **kwargs):
        arrays = list(plain(operands))
        for place, letters in enumerate(names):
            value = value_of(site.node.args[1][place])
            for axis, count in site.counts(value, arrays[place]).items():
                if letters[axis] not in result:
                    arrays[place] = jnp.where(is_row(arrays[place], axis, count), arrays[place], 0)
        return site.run((equation, arrays), kwargs)

    return way


def find_order(node):
    """Find the way for sort, argsort and topk, which put elements beyond the rows last."""
    x, names = value_of(node.args[0]), [argument.name for argument in node.target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    if given.get("dim", -1) % x.dim() not in data_axes(x):
        return run
    falling = given.get("descending", False) if "descending" in names else given.get("largest", True)
    if not x.is_floating_point() or "k" in names and not isinstance(given["k"], int):
        return None
    return filling(lambda dtype: -jnp.inf if falling else jnp.nan, again=True)


def find_vector_norm(node):
    order = node.args[1] if len(node.args) > 1 else node.kwargs.get("ord", 2)
    return find_along(2, filled_with_zero)(node) if order >= 0 else None


filled_with_zero = filling(lambda dtype: 0)
