"""Sampling of images and volumes at computed points: torch.nn.functional.grid_sample."""

import itertools

import jax
import jax.numpy as jnp

from torch_bridge.lowering.dtypes import wide
from torch_bridge.lowering.table import lowering

BILINEAR, NEAREST, BICUBIC = range(3)
ZEROS, BORDER, REFLECTION = range(3)


@lowering("grid_sampler_2d.default", "grid_sampler_3d.default")
def grid_sampler(call, x, grid, interpolation_mode, padding_mode, align_corners):
    """Sample x [batch, channel, *space] at grid [batch, *point, axis], from -1 to 1, the last axis of x first."""
    sizes = x.shape[2:]
    points = [_in_pixels(wide(grid[..., -1 - axis]), size, align_corners) for axis, size in enumerate(sizes)]
    settle = lambda point, size: _settled(point, size, padding_mode, align_corners)
    if interpolation_mode == BICUBIC:
        taps = [_cubic_taps(point) for point in points]
        taps = [[(settle(at, size), w) for at, w in axis] for axis, size in zip(taps, sizes, strict=True)]
    else:
        points = [settle(point, size) for point, size in zip(points, sizes, strict=True)]
        taps = [_nearest_taps(p) if interpolation_mode == NEAREST else _linear_taps(p) for p in points]
    total = 0
    for corner in itertools.product(*taps):
        weight = 1
        for _, part in corner:
            weight = weight * part
        total = total + _read(x, [at for at, _ in corner]) * jnp.expand_dims(weight, 1)
    return total.astype(x.dtype)


def _in_pixels(point, size: int, align_corners: bool):
    return (point + 1) / 2 * (size - 1) if align_corners else ((point + 1) * size - 1) / 2


def _settled(point, size: int, padding_mode: int, align_corners: bool):
    """Move a point outside the image to where its padding reads."""
    if padding_mode == REFLECTION:
        low, span = (0.0, size - 1) if align_corners else (-0.5, size)
        if span == 0:
            return jnp.zeros_like(point)
        away = jnp.abs(point - low)
        rest, flips = jnp.fmod(away, span), jnp.floor(away / span)
        point = jnp.where(flips % 2 == 0, rest, span - rest) + low
    if padding_mode == ZEROS:
        return point
    moves = (point > 0) & (point < size - 1)  # on the border there is no gradient, as in torch
    return jnp.where(moves, point, jax.lax.stop_gradient(jnp.clip(point, 0, size - 1)))


def _nearest_taps(point):
    return [(jnp.round(point), jnp.ones_like(point))]


def _linear_taps(point):
    left = jnp.floor(point)
    part = point - left
    return [(left, 1 - part), (left + 1, part)]


def _cubic_taps(point, a: float = -0.75):
    """Return four neighbours, with their weights by Keys' kernel."""
    left = jnp.floor(point)
    part = point - left
    near = lambda x: ((a + 2) * x - (a + 3)) * x * x + 1
    far = lambda x: ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    weights = (far(part + 1), near(part), near(1 - part), far(2 - part))
    return [(left + step, weight) for step, weight in zip((-1, 0, 1, 2), weights, strict=True)]


def _read(x, coordinates):
    """Read x at whole coordinates, each [batch, *point]; 0 outside. Returns [batch, channel, *point]."""
    inside, flat = jnp.asarray(True), jnp.int32(0)
    for at, size in zip(coordinates, x.shape[2:], strict=True):
        inside = inside & (at >= 0) & (at <= size - 1)
        flat = flat * size + jnp.clip(at, 0, size - 1).astype(jnp.int32)
    batch, channels = x.shape[:2]
    values = jnp.take_along_axis(x.reshape(batch, channels, -1), flat.reshape(batch, 1, -1), axis=2, mode="clip")
    return jnp.where(inside[:, None], values.reshape(batch, channels, *flat.shape[1:]), 0)
