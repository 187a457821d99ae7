"""Interpolation of images and sequences: every axis is resampled by a matrix [output, input] made on the host."""

import numpy as np
from jax import numpy as jnp

from torch_bridge.lowering.dtypes import wide
from torch_bridge.lowering.table import lowering


def _scale(size: int, count: int, align_corners: bool, factor) -> float:
    """Return the input steps per output step."""
    if align_corners:
        return (size - 1) / (count - 1) if count > 1 else 0.0
    return 1 / factor if factor else size / count


def _centres(size, count, align_corners, factor) -> np.ndarray:
    scale = _scale(size, count, align_corners, factor)
    return np.arange(count) * scale if align_corners else (np.arange(count) + 0.5) * scale - 0.5


def _collect(size: int, columns: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Add up weights [output, tap] at clamped columns into a matrix [output, size]."""
    matrix = np.zeros((len(columns), size))
    rows = np.broadcast_to(np.arange(len(columns))[:, None], columns.shape)
    np.add.at(matrix, (rows, np.clip(columns, 0, size - 1)), weights)
    return matrix


def linear_matrix(size: int, count: int, align_corners: bool, factor=None) -> np.ndarray:
    centre = np.maximum(_centres(size, count, align_corners, factor), 0)
    left = np.minimum(np.floor(centre).astype(int), size - 1)
    part = centre - left
    return _collect(size, np.stack([left, left + 1], 1), np.stack([1 - part, part], 1))


def _cubic(distance: np.ndarray, a: float) -> np.ndarray:
    """Evaluate Keys' kernel. torch takes a = -0.75, with antialiasing -0.5."""
    x = np.abs(distance)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0))


def cubic_matrix(size: int, count: int, align_corners: bool, factor=None) -> np.ndarray:
    centre = _centres(size, count, align_corners, factor)
    columns = np.floor(centre).astype(int)[:, None] + np.arange(-1, 3)
    return _collect(size, columns, _cubic(centre[:, None] - columns, -0.75))


def _antialias_matrix(size, count, align_corners, factor, reach: int, kernel) -> np.ndarray:
    """Source: torch aten/native/cpu/UpSampleKernel, the Pillow-like filters, described in torch's interpolate docs."""
    scale = _scale(size, count, align_corners, factor)
    stretch = max(scale, 1.0)
    centre = (np.arange(count) + 0.5) * scale
    start = np.maximum((centre - reach * stretch + 0.5).astype(int), 0)
    end = np.minimum((centre + reach * stretch + 0.5).astype(int), size)
    column = np.arange(size)
    weights = kernel((column - centre[:, None] + 0.5) / stretch)
    weights = np.where((column >= start[:, None]) & (column < end[:, None]), weights, 0)
    return weights / weights.sum(1, keepdims=True)


def antialias_linear_matrix(size, count, align_corners, factor=None) -> np.ndarray:
    return _antialias_matrix(size, count, align_corners, factor, 1, lambda x: np.maximum(1 - np.abs(x), 0))


def antialias_cubic_matrix(size, count, align_corners, factor=None) -> np.ndarray:
    return _antialias_matrix(size, count, align_corners, factor, 2, lambda x: _cubic(x, -0.5))


def _sizes(x, rank: int, output_size, factors) -> list[int]:
    if output_size is not None:
        return list(output_size)
    return [int(size * factor) for size, factor in zip(x.shape[-rank:], factors, strict=True)]


def _factors(rank: int, factors) -> list:
    """Return a factor or None per axis; `.vec` passes one list of factors or None, `.default` one number per axis."""
    if len(factors) == 1 and (factors[0] is None or isinstance(factors[0], (list, tuple))):
        return list(factors[0] or [None] * rank)
    return [*factors, *[None] * (rank - len(factors))]


def _resample(x, rank: int, sizes, matrices):
    y = wide(x)
    for axis, (count, matrix) in enumerate(zip(sizes, matrices, strict=True)):
        axis = x.ndim - rank + axis
        y = jnp.moveaxis(jnp.tensordot(y, matrix.astype(y.dtype), ((axis,), (1,))), -1, axis)
        assert y.shape[axis] == count
    return y.astype(x.dtype)


def _smooth(rank: int, matrix):
    def lower(call, x, output_size, align_corners, *factors):
        factors = _factors(rank, factors)
        sizes = _sizes(x, rank, output_size, factors)
        each = zip(x.shape[-rank:], sizes, factors, strict=True)
        return _resample(x, rank, sizes, [matrix(size, count, align_corners, factor) for size, count, factor in each])

    return lower


def _nearest(rank: int, exact: bool):
    def lower(call, x, output_size, *factors):
        factors = _factors(rank, factors)
        sizes = _sizes(x, rank, output_size, factors)
        for axis, (count, factor) in enumerate(zip(sizes, factors, strict=True)):
            axis = x.ndim - rank + axis
            size = x.shape[axis]
            scale = np.float32(_scale(size, count, False, factor))
            source = np.floor((np.arange(count) + (0.5 if exact else 0)).astype(np.float32) * scale).astype(int)
            x = jnp.take(x, np.minimum(source, size - 1), axis=axis)
        return x

    return lower


for _rank, _name in ((1, "linear1d"), (2, "bilinear2d"), (3, "trilinear3d")):
    lowering(f"upsample_{_name}.vec", f"upsample_{_name}.default")(_smooth(_rank, linear_matrix))
    lowering(f"upsample_nearest{_rank}d.vec", f"upsample_nearest{_rank}d.default")(_nearest(_rank, False))
    lowering(f"_upsample_nearest_exact{_rank}d.vec", f"_upsample_nearest_exact{_rank}d.default")(_nearest(_rank, True))
lowering("upsample_bicubic2d.vec", "upsample_bicubic2d.default")(_smooth(2, cubic_matrix))
lowering("_upsample_bilinear2d_aa.vec", "_upsample_bilinear2d_aa.default")(_smooth(2, antialias_linear_matrix))
lowering("_upsample_bicubic2d_aa.vec", "_upsample_bicubic2d_aa.default")(_smooth(2, antialias_cubic_matrix))
