"""Operators that sum up, pick extremes, or accumulate along axes."""

from typing import Any

import jax
import jax.numpy as jnp

from torch_bridge.lowering.dtypes import category, is_float, jax_dtype, real_dtype, whole_dtype, wide
from torch_bridge.lowering.operators.derivatives import derived, shared, sloped, zero_where
from torch_bridge.lowering.table import lowering


def axes_of(x, dim) -> tuple[int, ...]:
    """Return the axes that dim names; None and [] mean all."""
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return tuple(range(x.ndim))
    dims = [dim] if isinstance(dim, int) else dim
    return tuple(d % x.ndim for d in dims) if x.ndim else ()


@lowering("sum.default", "sum.dim_IntList")
def sum_(call, x, dim=None, keepdim=False, *, dtype=None):
    if dtype is not None:
        x = x.astype(jax_dtype(dtype))
    elif category(x.dtype) < 2:
        x = x.astype(whole_dtype(x))
    return jnp.sum(wide(x), axes_of(x, dim), keepdims=keepdim).astype(x.dtype)


@lowering("mean.default", "mean.dim")
def mean(call, x, dim=None, keepdim=False, *, dtype=None):
    x = x if dtype is None else x.astype(jax_dtype(dtype))
    return jnp.mean(wide(x), axes_of(x, dim), keepdims=keepdim).astype(x.dtype)


@lowering("nansum.default")
def nansum(call, x, dim=None, keepdim=False, *, dtype=None):
    """Sum without NaN. The gradient is multiplied by 0 there: an infinite one, nanmean's of nothing but NaN, is NaN."""
    known = x == x
    value = jnp.where(known, jax.lax.stop_gradient(x), 0).astype(x.dtype)
    if is_float(x):
        value = derived(value, lambda known, move: known * move, known.astype(x.dtype), x)
    return sum_(call, value, dim, keepdim, dtype=dtype)


@lowering("prod.default")
def prod(call, x, *, dtype=None):
    return prod_dim(call, x, None, False, dtype=dtype)


@lowering("prod.dim_int")
def prod_dim(call, x, dim=None, keepdim=False, *, dtype=None):
    if dtype is not None:
        x = x.astype(jax_dtype(dtype))
    elif category(x.dtype) < 2:
        x = x.astype(whole_dtype(x))
    return jnp.prod(x, axes_of(x, dim), keepdims=keepdim)


@lowering("amax.default")
def amax(call, x, dim=(), keepdim=False):
    return jnp.max(x, axes_of(x, dim), keepdims=keepdim)


@lowering("amin.default")
def amin(call, x, dim=(), keepdim=False):
    return jnp.min(x, axes_of(x, dim), keepdims=keepdim)


@lowering("max.default")
def max_all(call, x):
    return jnp.max(x)


@lowering("min.default")
def min_all(call, x):
    return jnp.min(x)


def _pick(x, dim: int, keepdim: bool, find):
    """Return the values at the found positions, so that the gradient goes to one of several equal ones."""
    if not x.ndim:
        return x, jnp.zeros((), jnp.int32)
    where = find(x, axis=dim, keepdims=True).astype(jnp.int32)
    values = jnp.take_along_axis(x, where, axis=dim)
    return (values, where) if keepdim else (jnp.squeeze(values, dim), jnp.squeeze(where, dim))


@lowering("max.dim")
def max_dim(call, x, dim, keepdim=False):
    return _pick(x, dim, keepdim, jnp.argmax)


@lowering("min.dim")
def min_dim(call, x, dim, keepdim=False):
    return _pick(x, dim, keepdim, jnp.argmin)


@lowering("argmax.default")
def argmax(call, x, dim=None, keepdim=False):
    return jnp.argmax(x, dim if x.ndim else None, keepdims=keepdim).astype(jnp.int32)


@lowering("argmin.default")
def argmin(call, x, dim=None, keepdim=False):
    return jnp.argmin(x, dim if x.ndim else None, keepdims=keepdim).astype(jnp.int32)


@lowering("median.default")
def median(call, x):
    """Return the lower of the two middle elements, NaN if any is NaN. Equal elements share the gradient."""
    return _middle(x, jnp.sort(x.reshape(-1)), (x.size - 1) // 2 if x.size else 0, propagate=True)


@lowering("nanmedian.default")
def nanmedian(call, x):
    ordered = jnp.sort(x.reshape(-1))  # NaN come last
    return _middle(x, ordered, (jnp.sum(x == x) - 1).clip(0) // 2, propagate=False)


def _middle(x, ordered, position, propagate: bool):
    if not x.size:
        return jnp.full((), jnp.nan, x.dtype)
    value = ordered[position]
    if propagate and jnp.issubdtype(x.dtype, jnp.floating):
        value = jnp.where(jnp.any(x != x), jnp.nan, value)
    axes = tuple(range(x.ndim))
    return shared(value, x, axes, value) if jnp.issubdtype(x.dtype, jnp.floating) else value


@lowering("median.dim")
def median_dim(call, x, dim, keepdim=False):
    return _pick(x, dim, keepdim, lambda x, axis, keepdims: _middle_place(x, axis, propagate=True))


@lowering("nanmedian.dim")
def nanmedian_dim(call, x, dim, keepdim=False):
    return _pick(x, dim, keepdim, lambda x, axis, keepdims: _middle_place(x, axis, propagate=False))


def _middle_place(x, axis: int, propagate: bool):
    """Return the position of the lower middle element; of the first NaN if `propagate`."""
    order = jnp.argsort(x, axis)
    count = jnp.sum(x == x, axis, keepdims=True)
    middle = jnp.take_along_axis(order, (count - 1).clip(0) // 2, axis)
    if not propagate:
        return middle
    return jnp.where(count < x.shape[axis], jnp.argmax(x != x, axis, keepdims=True), middle)


@lowering("any.default", "any.dim", "any.dims")
def any_(call, x, dim=None, keepdim=False):
    return jnp.any(x, axes_of(x, dim), keepdims=keepdim)


@lowering("all.default", "all.dim", "all.dims")
def all_(call, x, dim=None, keepdim=False):
    return jnp.all(x, axes_of(x, dim), keepdims=keepdim)


@lowering("count_nonzero.default", "count_nonzero.dim_IntList")
def count_nonzero(call, x, dim=None):
    return jnp.count_nonzero(x, axes_of(x, dim)).astype(jnp.int32)


def _correction(correction, unbiased) -> float:
    return float(unbiased) if correction is None else correction


@lowering("var.correction", "var.dim")
def var(call, x, dim=None, unbiased=True, keepdim=False, *, correction=None):
    return _variance(x, dim, _correction(correction, unbiased), keepdim).astype(real_dtype(x))


def _variance(x, dim, correction, keepdim):
    axes = axes_of(x, dim)
    x = wide(x)
    centred = x - jnp.mean(x, axes, keepdims=True)
    count = 1
    for axis in axes:
        count *= x.shape[axis]
    squares = jnp.square(centred.real) + jnp.square(centred.imag) if category(x.dtype) == 3 else jnp.square(centred)
    return jnp.sum(squares, axes, keepdims=keepdim) / max(count - correction, 0)


@lowering("std.correction", "std.dim")
def std(call, x, dim=None, unbiased=True, keepdim=False, *, correction=None):
    """Compute std, whose gradient is 0 where all elements are equal."""
    variance = _variance(x, dim, _correction(correction, unbiased), keepdim)
    root = jnp.sqrt(jax.lax.stop_gradient(variance))
    return sloped(root, (variance, zero_where(root == 0, 0.5 / jnp.where(root == 0, 1, root)))).astype(real_dtype(x))


@lowering("var_mean.correction", "var_mean.dim")
def var_mean(call, x, dim=None, unbiased=True, keepdim=False, *, correction=None):
    return var(call, x, dim, unbiased, keepdim, correction=correction), mean(call, x, dim, keepdim)


def _of_everything(function):
    return lambda call, x, unbiased=True: function(call, x, None, unbiased)


lowering("var.default")(_of_everything(var))
lowering("std.default")(_of_everything(std))
lowering("var_mean.default")(_of_everything(var_mean))


@lowering("std_mean.correction")
def std_mean(call, x, dim=None, *, correction=None, keepdim=False):
    return std(call, x, dim, True, keepdim, correction=correction), mean(call, x, dim, keepdim)


@lowering("logsumexp.default")
def logsumexp(call, x, dim, keepdim=False):
    return jax.nn.logsumexp(x, axes_of(x, dim), keepdims=keepdim)


@lowering("_safe_softmax.default")
def safe_softmax(call, x, dim, dtype=None):
    """Compute softmax; a row of -inf gives zeros, with gradient 0."""
    blind = jnp.all(jnp.isneginf(x), axis=dim, keepdims=True) if x.ndim else jnp.isneginf(x)
    value = softmax(call, jnp.where(blind, 0, x), dim, dtype)
    return jnp.where(blind, 0, value)


@lowering("softmax.int", "_softmax.default")
def softmax(call, x, dim, half_to_float_or_dtype=None, dtype=None):
    x, dtype = _softmax_input(x, half_to_float_or_dtype, dtype)
    return jax.nn.softmax(wide(x), axis=dim).astype(dtype) if x.ndim else jnp.ones((), dtype)


@lowering("log_softmax.int", "_log_softmax.default")
def log_softmax(call, x, dim, half_to_float_or_dtype=None, dtype=None):
    x, dtype = _softmax_input(x, half_to_float_or_dtype, dtype)
    return jax.nn.log_softmax(wide(x), axis=dim).astype(dtype) if x.ndim else jnp.zeros((), dtype)


def _softmax_input(x, option, dtype):
    """Return the input and the result's dtype. option: torch's public operator has a dtype there, its kernel a bool."""
    dtype = option if dtype is None and not isinstance(option, bool) else dtype
    if dtype is not None:
        x = x.astype(jax_dtype(dtype))
    return x, jnp.float32 if option is True else x.dtype


@lowering("cumsum.default")
def cumsum(call, x, dim, *, dtype=None):
    x = x.astype(jax_dtype(dtype)) if dtype is not None else x.astype(whole_dtype(x)) if category(x.dtype) < 2 else x
    return jnp.cumsum(x, dim) if x.ndim else x


@lowering("cumprod.default")
def cumprod(call, x, dim, *, dtype=None):
    x = x.astype(jax_dtype(dtype)) if dtype is not None else x.astype(whole_dtype(x)) if category(x.dtype) < 2 else x
    return jnp.cumprod(x, dim) if x.ndim else x


@lowering("logcumsumexp.default")
def logcumsumexp(call, x, dim):
    return jax.lax.cumlogsumexp(x, dim % x.ndim) if x.ndim else x


def _cumulative_extreme(better):
    def lower(call, x, dim):
        """Return running extremes and their positions; of equal elements the later one counts, as in torch."""
        if not x.ndim:
            return x, jnp.zeros((), jnp.int32)
        axis = dim % x.ndim
        index = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)

        def join(first, second):
            take = better(second[0], first[0])
            return jnp.where(take, second[0], first[0]), jnp.where(take, second[1], first[1])

        _, where = jax.lax.associative_scan(join, (jax.lax.stop_gradient(x), index), axis=axis)
        return jnp.take_along_axis(x, where, axis=axis), where

    return lower


# A NaN is better than any number: from there on all are NaN, as in torch.
lowering("cummax.default")(_cumulative_extreme(lambda new, old: (new >= old) | (new != new)))
lowering("cummin.default")(_cumulative_extreme(lambda new, old: (new <= old) | (new != new)))


@lowering("nonzero_static.default")
def nonzero_static(call, x, *, size, fill_value=-1):
    if not x.ndim:
        return jnp.zeros((size, 0), jnp.int32)
    return jnp.stack(jnp.nonzero(x, size=size, fill_value=fill_value), axis=-1).astype(jnp.int32)


@lowering("equal.default")
def equal(call, x, y):
    return jnp.array_equal(x, y)


@lowering("isclose.default")
def isclose(call, x, y, rtol=1e-5, atol=1e-8, equal_nan=False):

    return jnp.isclose(x, y, rtol, atol, equal_nan)


@lowering("histc.default")
def histc(call, x, bins=100, min=0, max=0):
    """Count elements in equal bins; the last one includes its upper end. Without limits, take those of the data."""
    low, high = (jnp.min(x), jnp.max(x)) if min == max else (min, max)
    low, high = jnp.asarray(low, jnp.float32), jnp.asarray(high, jnp.float32)
    low, high = jnp.where(low == high, low - 1, low), jnp.where(low == high, high + 1, high)
    x = x.reshape(-1)
    place = jnp.clip(((x - low) / (high - low) * bins).astype(jnp.int32), 0, bins - 1)
    return jnp.zeros(bins, x.dtype).at[place].add(((x >= low) & (x <= high)).astype(x.dtype))


@lowering("mode.default")
def mode(call, x, dim=-1, keepdim=False):
    """Return the most frequent value, the smallest of several, and its last position."""
    if not x.ndim:
        return x, jnp.zeros((), jnp.int32)
    moved = jnp.moveaxis(x, dim, -1)
    count = jnp.sum(moved[..., :, None] == moved[..., None, :], axis=-1)
    largest = jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).max
    best = jnp.where(count == count.max(-1, keepdims=True), moved, jnp.asarray(largest, x.dtype)).min(-1)
    same = moved == best[..., None]
    last = moved.shape[-1] - 1 - jnp.argmax(same[..., ::-1], axis=-1)
    values = jnp.take_along_axis(moved, last[..., None], axis=-1)
    where = last[..., None].astype(jnp.int32)
    values, where = jnp.moveaxis(values, -1, dim), jnp.moveaxis(where, -1, dim)
    return (values, where) if keepdim else (jnp.squeeze(values, dim), jnp.squeeze(where, dim))


@lowering("histogram.bin_ct")
def histogram(call, x, bins=100, *, range=None, weight=None, density=False):
    """Return counts, or weights, in equal bins, and the bins' edges."""
    low, high = (jnp.min(x), jnp.max(x)) if range is None else range
    low, high = jnp.asarray(low, x.dtype), jnp.asarray(high, x.dtype)
    low, high = jnp.where(low == high, low - 0.5, low), jnp.where(low == high, high + 0.5, high)
    return histogram_of(call, x, jnp.linspace(low, high, bins + 1, dtype=x.dtype), weight=weight, density=density)


@lowering("histogram.bins_tensor")
def histogram_of(call, x, bins, *, weight=None, density=False):
    """Return counts, or weights, in these bins, the last of which includes its upper end; and the bins' edges."""
    x = x.reshape(-1)
    place = jnp.searchsorted(bins, x, side="right") - 1
    place = jnp.where(x == bins[-1], bins.size - 2, place)
    inside = (x >= bins[0]) & (x <= bins[-1])
    each = jnp.ones_like(x) if weight is None else weight.reshape(-1).astype(x.dtype)
    counts = jnp.zeros(bins.size - 1, x.dtype).at[place].add(jnp.where(inside, each, 0), mode="drop")
    return counts / (jnp.sum(counts) * jnp.diff(bins)) if density else counts, bins


@lowering("segment_reduce.default")
def segment_reduce(
    call, x, reduce, *, lengths: Any = None, indices=None, offsets: Any = None, axis=0, unsafe=False, initial=None
):
    """Reduce each run along an axis to one element. lengths: of the runs, [*axes before, run]; or their offsets."""
    lengths = jnp.diff(offsets, axis=-1) if lengths is None else lengths
    end = jnp.cumsum(lengths, -1)[..., None]
    place = jnp.arange(x.shape[axis])
    own = (place < end) & (place >= end - lengths[..., None])  # [*axes before, run, place]
    own = own.reshape(own.shape + (1,) * (x.ndim - axis - 1))
    neutral = {"sum": 0, "mean": 0, "prod": 1, "max": -jnp.inf, "min": jnp.inf}[reduce]
    parts = jnp.where(own, jnp.expand_dims(x, axis), jnp.asarray(neutral, x.dtype))
    run = {"sum": jnp.sum, "mean": jnp.sum, "prod": jnp.prod, "max": jnp.max, "min": jnp.min}[reduce]
    value = run(parts, axis + 1)
    if initial is not None:
        join = {"sum": jnp.add, "mean": jnp.add, "prod": jnp.multiply, "max": jnp.maximum, "min": jnp.minimum}[reduce]
        value = join(value, jnp.asarray(initial, x.dtype))
    if reduce != "mean":
        return value
    count = lengths.reshape(lengths.shape + (1,) * (x.ndim - axis - 1))
    empty = jnp.nan if initial is None else value
    return jnp.where(count > 0, value / jnp.maximum(count, 1), empty).astype(x.dtype)
