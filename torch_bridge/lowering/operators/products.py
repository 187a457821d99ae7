"""Matrix products, convolutions, decompositions of matrices, Fourier transforms."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.nn import float8
from jaxtrain.nn.correlation import correlate
from torch_bridge.lowering.dtypes import cast, jax_dtype, match_products, promote
from torch_bridge.lowering.operators import lu
from torch_bridge.lowering.table import lowering


@lowering("linear.default")
def linear(call, x, weight, bias=None):
    """Return x weight^T + bias. weight: [out, in], as torch keeps it."""
    x, weight, bias = match_products(x, weight, bias)
    y = float8.product(x, weight) if x.dtype == weight.dtype and float8.takes(x, weight) else jnp.matmul(x, weight.T)
    return y if bias is None else y + bias


@lowering("mm.default", "bmm.default", "matmul.default", "mv.default", "dot.default", "vdot.default")
def matmul(call, x, y):
    return jnp.matmul(*promote(*match_products(x, y)))


@lowering("addmm.default", "addmv.default")
def addmm(call, bias, x, y, *, beta=1, alpha=1):
    return _scaled_sum(bias, matmul(call, x, y), beta, alpha)


@lowering("baddbmm.default")
def baddbmm(call, bias, x, y, *, beta=1, alpha=1):
    return _scaled_sum(bias, matmul(call, x, y), beta, alpha)


@lowering("addbmm.default")
def addbmm(call, bias, x, y, *, beta=1, alpha=1):
    return _scaled_sum(bias, jnp.sum(matmul(call, x, y), axis=0), beta, alpha)


@lowering("addr.default")
def addr(call, bias, x, y, *, beta=1, alpha=1):
    return _scaled_sum(bias, jnp.outer(x, y), beta, alpha)


def _scaled_sum(bias, product, beta, alpha):
    product = product if alpha == 1 else product * cast(alpha, product.dtype)
    if beta == 0:
        return product  # torch ignores the bias then, NaN or not
    bias = cast(bias, product.dtype)
    return product + (bias if beta == 1 else bias * cast(beta, bias.dtype))


@lowering("outer.default")
def outer(call, x, y):
    return jnp.outer(*promote(x, y))


@lowering("einsum.default")
def einsum(call, equation, operands, *, path=None):
    return jnp.einsum(equation.replace(" ", ""), *match_products(*operands))


@lowering("bilinear.default")
def bilinear(call, x, y, weight, bias=None):
    x, y, weight = match_products(x, y, weight)
    z = jnp.einsum("...i,oij,...j->...o", x, weight, y)
    return z if bias is None else z + bias


@lowering("convolution.default")
def convolution(call, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    """Convolve x, [batch, channel, *space] or without batch. weight: [out, in / groups, *kernel], or [in, out / groups,
    *kernel] if transposed."""
    x, weight, bias = match_products(x, weight, bias)
    rank = weight.ndim - 2
    stride, padding, dilation, output_padding = (_fit(v, rank) for v in (stride, padding, dilation, output_padding))
    batched = x if x.ndim == rank + 2 else x[None]
    run = _transposed if transposed else _convolution
    y = run(batched, weight, stride, padding, dilation, output_padding, groups)
    if bias is not None:
        y = y + bias.reshape((-1,) + (1,) * rank)
    return y if x.ndim == rank + 2 else y[0]


def _fit(values, rank: int) -> list[int]:
    values = [values] if isinstance(values, int) else list(values)
    return values * rank if len(values) == 1 else values


def _convolution(x, weight, stride, padding, dilation, _, groups):
    return correlate(x, weight, stride, [(p, p) for p in padding], dilation=dilation, groups=groups)


def _transposed(x, weight, stride, padding, dilation, output_padding, groups):
    """Convolve the input, with gaps between its elements, by the flipped kernel."""
    inputs, outputs, *kernel = weight.shape
    weight = weight.reshape(groups, inputs // groups, outputs, *kernel).swapaxes(1, 2)
    weight = jnp.flip(weight.reshape(groups * outputs, inputs // groups, *kernel), tuple(range(2, 2 + len(kernel))))
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    pads = [(r - p, r - p + extra) for r, p, extra in zip(reach, padding, output_padding, strict=True)]
    return correlate(x, weight, [1] * len(kernel), pads, stride, dilation, groups)


@lowering("linalg_inv.default")
def inverse(call, x):
    return jnp.linalg.inv(x)


@lowering("linalg_inv_ex.default")
def inverse_ex(call, x, *, check_errors=False):
    return jnp.linalg.inv(x), lu.first_zero(jax.lax.linalg.lu(x)[0])


@lowering("linalg_solve_triangular.default")
def solve_triangular(call, a, b, *, upper, left=True, unitriangular=False):
    if not left:
        a, b = jnp.swapaxes(a, -1, -2), jnp.swapaxes(b, -1, -2)
        upper = not upper
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = jnp.broadcast_to(a, batch + a.shape[-2:]), jnp.broadcast_to(b, batch + b.shape[-2:])
    x = jax.scipy.linalg.solve_triangular(a, b, lower=not upper, unit_diagonal=unitriangular)
    return x if left else jnp.swapaxes(x, -1, -2)


@lowering("_linalg_det.default")
def det(call, x):
    """Return the determinant, and stand-ins for the factors, which torch's backward pass reads: graphs that have one
    take the operator apart (capture/decompositions.py)."""
    value = jnp.linalg.det(x) if x.shape[-1] else jnp.ones(x.shape[:-2], x.dtype)
    return value, x, jnp.zeros(x.shape[:-1], jnp.int32)


@lowering("_linalg_slogdet.default")
def slogdet(call, x):
    if not x.shape[-1]:
        one = jnp.ones(x.shape[:-2], x.dtype)
        return one, jnp.zeros_like(one.real), x, jnp.zeros(x.shape[:-1], jnp.int32)
    sign, logarithm = jnp.linalg.slogdet(x)
    return sign, logarithm, x, jnp.zeros(x.shape[:-1], jnp.int32)


@lowering("linalg_solve.default")
def linalg_solve(call, a, b, *, left=True):
    return solve(call, a, b, left=left)[0]


@lowering("_linalg_solve_ex.default")
def solve(call, a, b, *, left=True, check_errors=False):
    if not left:
        a, b = jnp.swapaxes(a, -1, -2), jnp.swapaxes(b, -1, -2)
    vector = b.ndim == a.ndim - 1 and b.shape == a.shape[:-1]
    x = jnp.linalg.solve(a, b[..., None])[..., 0] if vector else jnp.linalg.solve(a, b)
    x = x if left else jnp.swapaxes(x, -1, -2)
    factors, pivots, info = lu.lu_factor(call, a if left else jnp.swapaxes(a, -1, -2))
    return x, factors, pivots, info


def _fourier_scale(shape, dims, normalization: int) -> float:
    """Return the scale of torch's codes: 0 none, 1 by the root of the length, 2 by the length."""
    length = math.prod(shape[dim] for dim in dims)
    return (1.0, 1 / math.sqrt(length), 1 / length)[normalization]


@lowering("_fft_c2c.default")
def fft_c2c(call, x, dim, normalization, forward):
    if not dim:
        return x
    scale = _fourier_scale(x.shape, dim, normalization)
    if forward:
        return jnp.fft.fftn(x, axes=dim) * scale
    return jnp.fft.ifftn(x, axes=dim, norm="forward") * scale


@lowering("_fft_r2c.default")
def fft_r2c(call, x, dim, normalization, onesided):
    scale = _fourier_scale(x.shape, dim, normalization)
    return (jnp.fft.rfftn(x, axes=dim) if onesided else jnp.fft.fftn(x, axes=dim)) * scale


@lowering("_fft_c2r.default")
def fft_c2r(call, x, dim, normalization, last_dim_size):
    sizes = [x.shape[d] for d in dim[:-1]] + [last_dim_size]
    scale = (1.0, 1 / math.sqrt(math.prod(sizes)), 1 / math.prod(sizes))[normalization]
    return jnp.fft.irfftn(x, s=sizes, axes=dim, norm="forward") * scale


@lowering("_grouped_mm.default", "transformers.grouped_mm_fallback.default")
def grouped_mm(call, x, weight, offs: Any = None, bias=None, out_dtype=None):
    """Compute products of groups. offs: where each group ends, along the axis that is cut into groups.

    x [row, inner], weight [group, inner, outer]: rows of each group times its matrix; rows past the last end give 0. x
    [group, row, inner], weight [inner, column]: the columns of each group. Both 2-D: the inner axis is cut, the result
    is [group, row, column]. Both 3-D: a batched product. Source: torch.nn.functional.grouped_mm.
    """
    x, weight = match_products(x, weight)
    if (x.ndim, weight.ndim) == (2, 3):
        out = jax.lax.ragged_dot(x, weight, jnp.diff(offs, prepend=0))
    elif (x.ndim, weight.ndim) == (3, 3):
        out = jnp.matmul(x, weight)
    else:
        ends = offs[:, None]
        place = jnp.arange(weight.shape[1] if x.ndim == 3 else weight.shape[0])
        own = ((place < ends) & (place >= jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]]))).astype(x.dtype)
        out = jnp.einsum("gmk,kn,gn->mn" if x.ndim == 3 else "mk,kn,gk->gmn", x, weight, own)
    out = out if bias is None else out + bias
    return out if out_dtype is None else out.astype(jax_dtype(out_dtype))
