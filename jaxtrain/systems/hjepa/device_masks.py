"""Masks drawn inside the compiled step, batched, with the distributions of the generators in `masks`.

Every sample has its own random key, so its mask does not depend on how the batch is split or sharded.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

ATTEMPTS = 10  # candidates per block; the first that overlaps no earlier block is taken


class Blocks(NamedTuple):
    """Shape of a mask. count: number of rectangles. scale: range of a rectangle's share of the grid. aspect: range of
    its width / height. divisor: a rectangle that fits nowhere becomes grid // divisor wide and high."""

    count: int
    scale: tuple[float, float]
    aspect: tuple[float, float]
    divisor: int = 2


def blocks_of(masking) -> Blocks:
    """Return a MaskingConfig's Blocks: I-JEPA's, or the original's level 0 with the aspect kept within [0.85, 1.15]."""
    low, high = masking.aspect_ratio
    if masking.generator == "multi_block":
        return Blocks(masking.num_masks, masking.mask_scale, (low, high), 4)
    return Blocks(masking.num_masks, masking.mask_scale, (max(low, 0.85), min(high, 1.15)))


def block_union(key, rows: int, columns: int, blocks: Blocks) -> jax.Array:
    """Return the union of random blocks on the grid, bool [rows, columns]."""

    def put(occupied, candidates):
        free = ~(candidates & occupied).any((1, 2))
        free = free.at[-1].set(True)  # the fallback may overlap
        return occupied | candidates[jnp.argmax(free)], None

    return jax.lax.scan(put, jnp.zeros((rows, columns), bool), _candidates(key, rows, columns, blocks))[0]


def _candidates(key, rows: int, columns: int, blocks: Blocks):
    """Return ATTEMPTS random rectangles and a small fallback per block, bool [block, ATTEMPTS + 1, rows, columns]."""
    (scale_low, scale_high), (aspect_low, aspect_high) = blocks.scale, blocks.aspect
    shape = (4, blocks.count, ATTEMPTS + 1)
    flat = jax.random.uniform(key, (math.prod(shape),))  # drawn flat, because XLA compiles that faster
    sizes, shapes, tops, lefts = flat.reshape(shape)
    area = (scale_low + sizes * (scale_high - scale_low)) * rows * columns
    ratio = aspect_low + shapes * (aspect_high - aspect_low)
    height = jnp.round(jnp.sqrt(area / ratio))
    width = jnp.round(height * ratio)
    height, width = jnp.clip(height, 1, rows), jnp.clip(width, 1, columns)
    height = height.at[:, -1].set(max(1, rows // blocks.divisor))
    width = width.at[:, -1].set(max(1, columns // blocks.divisor))
    top, start = jnp.floor(tops * (rows - height + 1)), jnp.floor(lefts * (columns - width + 1))
    row, column = jnp.arange(rows), jnp.arange(columns)
    inside_rows = (row >= top[..., None]) & (row < (top + height)[..., None])
    inside_columns = (column >= start[..., None]) & (column < (start + width)[..., None])
    return inside_rows[..., :, None] & inside_columns[..., None, :]


def to_count(key, union, count: int) -> jax.Array:
    """Return exactly `count` cells, bool [rows, columns]: the union, trimmed at its edge or grown around it."""
    cells = jnp.pad(union.astype(jnp.float32), 1)
    near = jax.lax.reduce_window(cells, 0.0, jax.lax.add, (3, 3), (1, 1), "valid") / 9
    order = (2 * union + near).reshape(-1) + 0.01 * jax.random.uniform(key, (union.size,))
    chosen = jax.lax.top_k(order, count)[1]
    return jnp.zeros(union.size, bool).at[chosen].set(True).reshape(union.shape)


def draw(keys, grid: int, blocks: Blocks, count: int | None) -> jax.Array:
    """Draw masks bool [batch, grid * grid], True = predict, one per key. count: patches per mask, or None for any."""

    def one(key):
        first, second = jax.random.split(key)
        union = block_union(first, grid, grid, blocks)
        return (union if count is None else to_count(second, union, count)).reshape(-1)

    return jax.vmap(one)(keys)


def largest_count(grid: int, blocks: Blocks) -> int:
    """Return an upper bound on the number of patches that a ragged mask covers."""
    most = max(1, grid // blocks.divisor) ** 2
    for ratio in blocks.aspect:
        height = math.sqrt(blocks.scale[1] * grid * grid / ratio) + 0.5
        most = max(most, math.ceil(height) * math.ceil(height * ratio + 0.5))
    return min(grid * grid, blocks.count * most)


def fixed_count(grid: int, blocks: Blocks, ratio: float | None) -> int:
    """Return the patches per fixed-count mask: `ratio` of the grid, or the blocks' average; one stays visible."""
    share = blocks.count * sum(blocks.scale) / 2 if ratio is None else ratio
    return min(max(1, round(share * grid * grid)), grid * grid - 1)
