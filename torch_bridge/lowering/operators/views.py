"""Operators that rearrange a tensor: shapes, axes, slices, joins, padding. A view in torch is a value here."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torch_bridge.lowering.dtypes import cast, jax_dtype, promote
from torch_bridge.lowering.table import lowering


@lowering("view.default", "reshape.default", "_unsafe_view.default", "_reshape_copy.default", "view_copy.default")
def view(call, x, size):
    return jnp.reshape(x, tuple(size))


@lowering("view.dtype", "view_copy.dtype")
def view_dtype(call, x, dtype):
    return jax.lax.bitcast_convert_type(x, jax_dtype(dtype))


@lowering("expand.default")
def expand(call, x, size, *, implicit=False):
    padded = (1,) * (len(size) - x.ndim) + x.shape
    return jnp.broadcast_to(x, tuple(have if want == -1 else want for have, want in zip(padded, size, strict=True)))


@lowering("permute.default", "permute_copy.default")
def permute(call, x, dims):
    return jnp.transpose(x, dims)


@lowering("transpose.int")
def transpose(call, x, first, second):
    return jnp.swapaxes(x, first, second) if x.ndim else x


@lowering("t.default")
def t(call, x):
    return x.T


@lowering("unsqueeze.default")
def unsqueeze(call, x, dim):
    return jnp.expand_dims(x, dim)


@lowering("squeeze.default", "squeeze.dim", "squeeze.dims")
def squeeze(call, x, dims=None):
    dims = range(x.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    return jnp.squeeze(x, tuple({dim % x.ndim for dim in dims if x.shape[dim] == 1} if x.ndim else ()))


def _bounds(size: int, start, end) -> tuple[int, int]:
    start = 0 if start is None else start + size if start < 0 else start
    end = size if end is None else end + size if end < 0 else end
    start = min(max(start, 0), size)
    return start, min(max(end, start), size)


def _along(x, dim: int, index) -> tuple:
    return (slice(None),) * (dim % x.ndim) + (index,)


@lowering("slice.Tensor")
def slice_(call, x, dim=0, start=None, end=None, step=1):
    start, end = _bounds(x.shape[dim], start, end)
    return jax.lax.slice_in_dim(x, start, end, step, dim % x.ndim)


@lowering("narrow_copy.default")
def narrow_copy(call, x, dim, start, length):
    return slice_(call, x, dim, start, start + length if start >= 0 else start + x.shape[dim] + length)


@lowering("slice_scatter.default")
def slice_scatter(call, x, source, dim=0, start=None, end=None, step=1):
    start, end = _bounds(x.shape[dim], start, end)
    return x.at[_along(x, dim, slice(start, end, step))].set(cast(source, x.dtype))


@lowering("select.int")
def select(call, x, dim, index):
    if hasattr(index, "dtype"):
        return jnp.take(x, index, axis=dim)
    return jax.lax.index_in_dim(x, index, dim % x.ndim, keepdims=False)


@lowering("select_scatter.default")
def select_scatter(call, x, source, dim, index):
    return x.at[_along(x, dim, index)].set(cast(source, x.dtype))


@lowering("diagonal.default")
def diagonal(call, x, offset=0, dim1=0, dim2=1):
    return jnp.diagonal(x, offset, dim1, dim2)


@lowering("diagonal_scatter.default")
def diagonal_scatter(call, x, source, offset=0, dim1=0, dim2=1):
    moved = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    length = source.shape[-1]
    rows = np.arange(length) + max(0, -offset)
    moved = moved.at[..., rows, np.arange(length) + max(0, offset)].set(cast(source, x.dtype))
    return jnp.moveaxis(moved, (-2, -1), (dim1, dim2))


@lowering("diag_embed.default")
def diag_embed(call, x, offset=0, dim1=-2, dim2=-1):
    size = x.shape[-1] + abs(offset)
    index = np.arange(x.shape[-1])
    matrix = jnp.zeros((*x.shape[:-1], size, size), x.dtype)
    matrix = matrix.at[..., index + max(0, -offset), index + max(0, offset)].set(x)
    return jnp.moveaxis(matrix, (-2, -1), (dim1, dim2))


@lowering("split.Tensor")
def split(call, x, split_size, dim=0):
    size = x.shape[dim]
    step = max(split_size, 1)
    return [
        jax.lax.slice_in_dim(x, start, min(start + step, size), axis=dim % x.ndim)
        for start in range(0, max(size, 1), step)
    ]


@lowering("split_with_sizes.default")
def split_with_sizes(call, x, sizes, dim=0):
    ends = np.cumsum(sizes).tolist()
    return [jax.lax.slice_in_dim(x, end - size, end, axis=dim % x.ndim) for size, end in zip(sizes, ends, strict=True)]


@lowering("unbind.int", "unbind_copy.int")
def unbind(call, x, dim=0):
    return [jax.lax.index_in_dim(x, index, dim % x.ndim, keepdims=False) for index in range(x.shape[dim])]


@lowering("cat.default")
def cat(call, tensors, dim=0):
    """Join tensors; an empty 1-d tensor joins anything, as in torch."""
    some = [x for x in tensors if x.ndim != 1 or x.shape[0]] or tensors[:1]
    dtype = promote(*tensors)[0].dtype if len({x.dtype for x in tensors}) > 1 else tensors[0].dtype
    return jnp.concatenate([cast(x, dtype) for x in some], axis=dim)


@lowering("stack.default")
def stack(call, tensors, dim=0):
    return jnp.stack(promote(*tensors), axis=dim)


@lowering("repeat.default")
def repeat(call, x, repeats):
    return jnp.tile(x.reshape((1,) * (len(repeats) - x.ndim) + x.shape), tuple(repeats))


@lowering("repeat_interleave.self_int")
def repeat_interleave(call, x, repeats, dim=None, *, output_size=None):
    return jnp.repeat(x, repeats, axis=dim)


@lowering("flip.default")
def flip(call, x, dims):
    return jnp.flip(x, tuple(dims)) if x.ndim else x


@lowering("roll.default")
def roll(call, x, shifts, dims=()):
    return jnp.roll(x, tuple(shifts), tuple(dims) or None) if dims else jnp.roll(x, shifts[0])


@lowering("unfold.default")
def unfold(call, x, dimension, size, step):
    if not x.ndim:
        return x.reshape(1)[:size]
    dimension %= x.ndim
    starts = np.arange(0, x.shape[dimension] - size + 1, step)
    windows = jnp.take(x, starts[:, None] + np.arange(size), axis=dimension)
    return jnp.moveaxis(windows, dimension + 1, -1)


@lowering("as_strided.default", "as_strided_copy.default")
def as_strided(call, x, size, stride, storage_offset=None):
    """Read elements of x by strides; x must lie in torch's memory as `in_order` requires."""
    return x.reshape(-1)[_addresses(x, size, stride, storage_offset)]


@lowering("as_strided_scatter.default")
def as_strided_scatter(call, x, source, size, stride, storage_offset=None):
    """Write elements of x by strides, where `as_strided` reads them."""
    places = _addresses(x, size, stride, storage_offset)
    return x.reshape(-1).at[places.reshape(-1)].set(source.reshape(-1)).reshape(x.shape)


def _addresses(x: Any, size: Sequence[int], stride: Sequence[int], storage_offset: int | None) -> np.ndarray:
    """Return positions in x's memory. Raises IndexError for positions beyond it."""
    index = np.asarray(storage_offset or 0)
    for count, step in zip(size, stride, strict=True):
        index = index[..., None] + np.arange(count) * step
    if index.size and index.max() >= x.size:
        raise IndexError(f"as_strided reads position {index.max()} of a tensor of {x.size} elements")
    return index


def in_order(tensor: Any) -> bool:
    """Return True if a torch tensor's memory holds its elements in the order of its axes, from its beginning."""
    return tensor.is_contiguous() and tensor.storage_offset() == 0


def _pairs(pad, ndim: int) -> list[tuple[int, int]]:
    """Return (before, after) per axis; torch lists them from the last axis backwards."""
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    return [(0, 0)] * (ndim - len(pairs)) + pairs[::-1]


@lowering("constant_pad_nd.default")
def constant_pad_nd(call, x, pad, value=0):
    """Pad with a constant; a negative width crops."""
    return jax.lax.pad(x, cast(value, x.dtype), [(*pair, 0) for pair in _pairs(pad, x.ndim)])


def _pad(mode: str):
    def lower(call, x, padding):
        pairs = _pairs(padding, x.ndim)
        y = jnp.pad(x, [(max(a, 0), max(b, 0)) for a, b in pairs], mode=mode)
        return y[tuple(slice(max(-a, 0), n - max(-b, 0)) for (a, b), n in zip(pairs, y.shape, strict=True))]

    return lower


lowering("reflection_pad1d.default", "reflection_pad2d.default", "reflection_pad3d.default")(_pad("reflect"))
lowering("replication_pad1d.default", "replication_pad2d.default", "replication_pad3d.default")(_pad("edge"))


@lowering("tril.default")
def tril(call, x, diagonal=0):
    return jnp.tril(x, diagonal)


@lowering("triu.default")
def triu(call, x, diagonal=0):
    return jnp.triu(x, diagonal)


@lowering("pixel_shuffle.default")
def pixel_shuffle(call, x, factor):
    *batch, channels, height, width = x.shape
    x = x.reshape(*batch, channels // factor**2, factor, factor, height, width)
    n = len(batch)
    x = jnp.transpose(x, (*range(n), n, n + 3, n + 1, n + 4, n + 2))
    return x.reshape(*batch, channels // factor**2, height * factor, width * factor)


@lowering("pixel_unshuffle.default")
def pixel_unshuffle(call, x, factor):
    *batch, channels, height, width = x.shape
    x = x.reshape(*batch, channels, height // factor, factor, width // factor, factor)
    n = len(batch)
    x = jnp.transpose(x, (*range(n), n, n + 2, n + 4, n + 1, n + 3))
    return x.reshape(*batch, channels * factor**2, height // factor, width // factor)


@lowering("channel_shuffle.default")
def channel_shuffle(call, x, groups):
    batch, channels, *space = x.shape
    return jnp.swapaxes(x.reshape(batch, groups, channels // groups, *space), 1, 2).reshape(x.shape)


@lowering("im2col.default")
def im2col(call, x, kernel_size, dilation, padding, stride):
    """Compute torch.nn.Unfold: [batch, channel, height, width] -> [batch, channel * kernel, position]."""
    batched = x if x.ndim == 4 else x[None]
    if not x.size:
        like = jax.ShapeDtypeStruct((1, 1, *batched.shape[2:]), x.dtype)
        _, rows, count = jax.eval_shape(lambda y: im2col(call, y, kernel_size, dilation, padding, stride), like).shape
        empty = jnp.zeros((batched.shape[0], batched.shape[1] * rows, count), x.dtype)
        return empty if x.ndim == 4 else empty[0]
    patches = jax.lax.conv_general_dilated_patches(
        batched, kernel_size, stride, [(p, p) for p in padding], rhs_dilation=dilation
    )
    patches = patches.reshape(*patches.shape[:2], -1)
    return patches if x.ndim == 4 else patches[0]


@lowering("col2im.default")
def col2im(call, x, output_size, kernel_size, dilation, padding, stride):
    """Compute torch.nn.Fold, the transpose of im2col."""
    batched = x if x.ndim == 3 else x[None]
    shape = (batched.shape[0], batched.shape[1] // math.prod(kernel_size), *output_size)
    like = jax.ShapeDtypeStruct(shape, x.dtype)
    (image,) = jax.linear_transpose(lambda y: im2col(call, y, kernel_size, dilation, padding, stride), like)(batched)
    return image if x.ndim == 3 else image[0]


@lowering("meshgrid.indexing", "meshgrid.default")
def meshgrid(call, tensors, *, indexing="ij"):
    return jnp.meshgrid(*(x.reshape(-1) for x in tensors), indexing=indexing)
