"""Operators that read or write at computed positions, and order elements."""

import functools

import jax
import jax.numpy as jnp

from jaxtrain.nn.rows import rows
from torch_bridge.lowering.dtypes import cast, result_type
from torch_bridge.lowering.operators.derivatives import derived, zero_where
from torch_bridge.lowering.table import lowering


def _of_a_number(lower):
    """Make a lowering index a 0-d tensor as one with a single element."""

    @functools.wraps(lower)
    def run(call, x, dim, index, *rest, **options):
        if x.ndim:
            return lower(call, x, dim, index, *rest, **options)
        rest = [
            value.reshape(-1) if getattr(value, "ndim", 1) == 0 and place == 0 else value
            for place, value in enumerate(rest)
        ]
        return lower(call, x.reshape(1), 0, index.reshape(-1), *rest, **options).reshape(())

    return run


@lowering("index_select.default")
def index_select(call, x, dim, index):
    if x.ndim and dim % x.ndim == 0:
        return rows(x, index, "clip")
    return jnp.take(x, index, axis=dim, mode="clip") if x.ndim else x


@lowering("gather.default")
def gather(call, x, dim, index, *, sparse_grad=False):
    """Gather along dim; `index` may be smaller than x along the other axes."""
    if not x.ndim:
        return jnp.broadcast_to(x, index.shape)
    dim %= x.ndim
    x = x[tuple(slice(None) if axis == dim else slice(size) for axis, size in enumerate(index.shape))]
    return jnp.take_along_axis(x, index, axis=dim, mode="clip")


def _boolean_masks(x, indices) -> list:
    """Return the boolean masks among the indices."""
    return [index for index in indices if index is not None and index.dtype == jnp.bool_]


def _first(indices) -> int:
    return next(place for place, index in enumerate(indices) if index is not None)


def _positions(x, indices) -> tuple:
    return tuple(slice(None) if index is None else index for index in indices)


@lowering("index.Tensor", "_unsafe_index.Tensor")
def index(call, x, indices):
    """Index x. A boolean mask must be known while tracing, because the result's shape depends on its values."""
    first, *others = indices
    if first is not None and first.ndim and first.dtype != jnp.bool_ and all(other is None for other in others):
        return rows(x, jnp.where(first < 0, first + x.shape[0], first), "clip")
    return x[_positions(x, indices)]


@lowering("index_put.default", "_unsafe_index_put.default")
def index_put(call, x, indices, values, accumulate=False):
    masks = _boolean_masks(x, indices)
    values = cast(values, x.dtype)
    if masks and sum(index is not None for index in indices) == 1:
        return _put_where(x, _first(indices), masks[0], values, accumulate)
    if masks:
        raise NotImplementedError("aten.index_put with a mask beside other indices: use torch.where")
    where = _positions(x, indices)
    return x.at[where].add(values) if accumulate else _written(x, where, values)


def _written(x, where: tuple, source):
    """Return x with `source` at these positions. Every source has the gradient, also of those written twice, as in
    torch."""
    fixed, value = jax.lax.stop_gradient((x, source))
    result = fixed.at[where].set(value)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return result
    arrays = {place: index for place, index in enumerate(where) if hasattr(index, "dtype")}
    kept = jnp.ones(x.shape, bool).at[where].set(False)

    def move(factors, x, source):
        kept, arrays = factors
        places = tuple(arrays.get(place, index) for place, index in enumerate(where))
        return jnp.where(kept, x, 0).at[places].add(source)

    return derived(result, move, (kept, arrays), x, source)


def _put_where(x, lead: int, mask, values, accumulate: bool):
    """Compute x[:, mask] = values, the mask after `lead` axes: the n-th True takes the n-th value, or all the only
    one."""
    rest = x.shape[lead + mask.ndim :]
    flat = x.reshape(*x.shape[:lead], -1, *rest)
    values = values.reshape((1,) * (flat.ndim - values.ndim) + values.shape)
    if values.shape[lead] != 1:
        order = jnp.cumsum(mask.reshape(-1)) - 1
        values = jnp.take(values, order, axis=lead, mode="clip")
    where = mask.reshape(-1, *(1,) * len(rest))
    return jnp.where(where, flat + values if accumulate else values, flat).reshape(x.shape)


@lowering("index_add.default")
@_of_a_number
def index_add(call, x, dim, index, source, *, alpha=1):
    where = (slice(None),) * (dim % x.ndim) + (index,)
    return x.at[where].add(cast(source, x.dtype) * cast(alpha, x.dtype))


@lowering("index_copy.default")
@_of_a_number
def index_copy(call, x, dim, index, source):
    return _written(x, (slice(None),) * (dim % x.ndim) + (index,), cast(source, x.dtype))


@lowering("index_fill.int_Scalar", "index_fill.int_Tensor")
@_of_a_number
def index_fill(call, x, dim, index, value):
    return x.at[(slice(None),) * (dim % x.ndim) + (index,)].set(jnp.reshape(cast(value, x.dtype), ()))


def _grid(shape, dim: int, index) -> tuple:
    """Return full coordinates of every element of `index`, its own value along `dim`."""
    grid = list(jnp.indices(index.shape, sparse=True))
    grid[dim % len(shape)] = index
    return tuple(grid)


@lowering("scatter.src", "scatter.value")
def scatter(call, x, dim, index, source):
    source = cast(source, x.dtype)
    if not x.ndim:
        return jnp.broadcast_to(source, x.shape)
    if source.ndim:
        source = source[tuple(map(slice, index.shape))]
    return _written(x, _grid(x.shape, dim, index), source)


@lowering("scatter_add.default")
def scatter_add(call, x, dim, index, source):
    if not x.ndim:
        return x + source.reshape(-1)[: index.size].sum()
    return x.at[_grid(x.shape, dim, index)].add(source[tuple(map(slice, index.shape))])


@lowering("scatter_reduce.two", "scatter.reduce", "scatter.value_reduce")
def scatter_reduce(call, x, dim, index, source, reduce, *, include_self=True):
    if not x.ndim:
        source = jnp.reshape(source, -1) if hasattr(source, "dtype") else source
        x, index = x.reshape(1), index.reshape(-1)
        return scatter_reduce(call, x, 0, index, source, reduce, include_self=include_self).reshape(())
    source = cast(source, x.dtype)
    source = source[tuple(map(slice, index.shape))] if source.ndim else jnp.broadcast_to(source, index.shape)
    where = _grid(x.shape, dim, index)
    touched = jnp.zeros(x.shape, bool).at[where].set(True)
    if reduce in ("sum", "add"):
        return _start(x, touched, 0, include_self).at[where].add(source)
    if reduce == "mean":
        count = jnp.zeros(x.shape, jnp.int32).at[where].add(1) + int(include_self)
        total = _start(x, touched, 0, include_self).at[where].add(source)
        count = jnp.maximum(count, 1)
        mean = total / count if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.floor_divide(total, count)
        return jnp.where(touched, mean.astype(x.dtype), x)
    run = functools.partial(_reduced, reduce=reduce, include_self=include_self)
    slopes_of = _slopes_of_product if reduce in ("prod", "multiply") else _slopes_of_extreme

    @jax.custom_jvp
    def result(x, source, where, touched):
        return run(x, source, where, touched)

    @result.defjvp
    def derivative(primals, moves):
        x, source, where, touched = primals
        value = result(x, source, where, touched)
        own, theirs = slopes_of(run, x, source, value, where, touched)
        own = own if include_self else zero_where(touched, own)
        return value, (own * moves[0]).at[where].add(theirs * moves[1])

    return (result if jnp.issubdtype(x.dtype, jnp.inexact) else run)(x, source, where, touched)


def _start(x, touched, neutral, include_self: bool):
    return x if include_self else jnp.where(touched, cast(neutral, x.dtype), x)


def _reduced(x, source, where, touched, reduce: str, include_self: bool):
    if reduce in ("prod", "multiply"):
        return _start(x, touched, 1, include_self).at[where].mul(source)
    if reduce == "amax":
        return _start(x, touched, -jnp.inf, include_self).at[where].max(source)
    return _start(x, touched, jnp.inf, include_self).at[where].min(source)


def _slopes_of_product(run, x, source, value, where, touched):
    """Return the products of all other factors, also where one factor is 0. Source: torch's scatter_reduce_backward."""
    filled = jnp.where(x == 0, 1, x)
    own = run(filled, source, where, touched) / filled
    zero = source == 0
    single = zero & (jnp.zeros(x.shape, jnp.int32).at[where].add(zero)[where] == 1)
    others = run(x, jnp.where(single, 1, source), where, touched)
    return own, jnp.where(single, others[where], value[where] / jnp.where(zero, 1, source))


def _slopes_of_extreme(run, x, source, value, where, touched):
    """Share the gradient among equal elements; x counts even where it does not take part, as in torch."""
    mine, theirs = (x == value).astype(x.dtype), (source == value[where]).astype(x.dtype)
    share = 1 / mine.at[where].add(theirs)
    return mine * share, theirs * share[where]


@lowering("index_reduce.default")
@_of_a_number
def index_reduce(call, x, dim, index, source, reduce, *, include_self=True):
    dim %= x.ndim
    wide = jnp.broadcast_to(index.reshape([-1 if axis == dim else 1 for axis in range(x.ndim)]), source.shape)
    return scatter_reduce(call, x, dim, wide, source, reduce, include_self=include_self)


@lowering("put.default")
def put(call, x, index, source, accumulate=False):
    flat, where, source = x.reshape(-1), (index.reshape(-1),), cast(source, x.dtype).reshape(-1)
    return (flat.at[where].add(source) if accumulate else _written(flat, where, source)).reshape(x.shape)


@lowering("repeat_interleave.Tensor")
def repeat_interleave(call, repeats, *, output_size=None):
    """Return positions, each as often as `repeats` says; output_size, the sum of repeats, is known beforehand."""
    return jnp.repeat(jnp.arange(repeats.shape[0], dtype=jnp.int32), repeats, total_repeat_length=output_size)


@lowering("masked_scatter.default")
def masked_scatter(call, x, mask, source):
    """Write the n-th element of the source where the mask is True for the n-th time."""
    mask = jnp.broadcast_to(mask, x.shape)
    order = jnp.cumsum(mask.reshape(-1)) - 1
    taken = jnp.take(source.reshape(-1), order, mode="clip").reshape(x.shape)
    return jnp.where(mask, taken, x)


@lowering("take.default")
def take(call, x, index):
    return x.reshape(-1)[index]


@lowering("one_hot.default", "torch_bridge.one_hot.default")
def one_hot(call, index, num_classes=-1):
    return jax.nn.one_hot(index, num_classes, dtype=jnp.int32)


@lowering("sort.default", "sort.stable")
def sort(call, x, dim=-1, descending=False, *, stable=None):
    if stable is not None and not isinstance(dim, int):
        raise TypeError("sort.stable takes its dimension by keyword")
    if not x.ndim:
        return x, jnp.zeros((), jnp.int32)
    order = jnp.argsort(x, axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, axis=dim), order.astype(jnp.int32)


@lowering("argsort.default", "argsort.stable")
def argsort(call, x, dim=-1, descending=False, *, stable=False):
    if not x.ndim:
        return jnp.zeros((), jnp.int32)
    return jnp.argsort(x, axis=dim, stable=True, descending=descending).astype(jnp.int32)


@lowering("topk.default")
def topk(call, x, k, dim=-1, largest=True, sorted=True):
    if not x.ndim:
        return x, jnp.zeros((), jnp.int32)
    moved = jnp.moveaxis(x, dim, -1)
    if largest:
        values, order = jax.lax.top_k(moved, k)
    else:
        order = jnp.argsort(moved, axis=-1, stable=True)[..., :k]
        values = jnp.take_along_axis(moved, order, axis=-1)
    return jnp.moveaxis(values, -1, dim), jnp.moveaxis(order.astype(jnp.int32), -1, dim)


@lowering("kthvalue.default")
def kthvalue(call, x, k, dim=-1, keepdim=False):
    if not x.ndim:
        return x, jnp.zeros((), jnp.int32)
    order = jnp.take(jnp.argsort(x, axis=dim, stable=True), jnp.asarray([k - 1]), axis=dim)
    values = jnp.take_along_axis(x, order, axis=dim)
    return (values, order) if keepdim else (jnp.squeeze(values, dim), jnp.squeeze(order, dim))


@lowering("searchsorted.Tensor", "searchsorted.Scalar")
def searchsorted(call, sorted_sequence, values, *, out_int32=False, right=False, side=None, sorter=None):
    side = "right" if right or side == "right" else "left"
    values = cast(values, result_type(sorted_sequence, values))
    if sorted_sequence.ndim == 1:
        return jnp.searchsorted(sorted_sequence, values, side=side).astype(jnp.int32)
    search = lambda rows, wanted: jnp.searchsorted(rows, wanted, side=side)
    for _ in range(sorted_sequence.ndim - 1):
        search = jax.vmap(search)
    return search(sorted_sequence, values).astype(jnp.int32)


@lowering("bucketize.Tensor", "bucketize.Scalar")
def bucketize(call, x, boundaries, *, out_int32=False, right=False):
    return jnp.searchsorted(boundaries, x, side="right" if right else "left").astype(jnp.int32)
