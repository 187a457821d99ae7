"""Masks drawn inside the step, batched: the distribution of `masks.HierarchicalMaskGenerator`'s level 0.

Every sample draws from a key of its own, so a batch's masks do not depend on how it is cut or sharded.
"""

import math

import jax
import jax.numpy as jnp

ATTEMPTS = 10  # candidates per block, of which the first that overlaps no earlier block is taken


def block_union(key, rows: int, columns: int, num_masks: int, scale, aspect) -> jax.Array:
    """The union of num_masks rectangles on the grid, bool [rows, columns].

    scale: range of a block's share of the grid. aspect: range of width / height, clipped to [0.85, 1.15] from below
    and above as at the original's level 0.
    """
    aspect = (max(aspect[0], 0.85), min(aspect[1], 1.15))
    candidates = _candidates(key, num_masks, rows, columns, scale, aspect)

    def place(occupied, candidates):
        free = ~(candidates & occupied).any((1, 2))
        free = free.at[-1].set(True)  # the fallback may overlap
        return occupied | candidates[jnp.argmax(free)], None

    return jax.lax.scan(place, jnp.zeros((rows, columns), bool), candidates)[0]


def _candidates(key, num_masks: int, rows: int, columns: int, scale, aspect):
    """For each block ATTEMPTS rectangles and a small fallback, bool [num_masks, ATTEMPTS + 1, rows, columns]."""
    shape = (4, num_masks, ATTEMPTS + 1)
    sizes, shapes, tops, lefts = jax.random.uniform(key, (math.prod(shape),)).reshape(
        shape
    )  # flat: XLA compiles it fast
    area = (scale[0] + sizes * (scale[1] - scale[0])) * rows * columns
    ratio = aspect[0] + shapes * (aspect[1] - aspect[0])
    height = jnp.round(jnp.sqrt(area / ratio))
    width = jnp.round(height * ratio)
    height, width = jnp.clip(height, 1, rows), jnp.clip(width, 1, columns)
    height = height.at[:, -1].set(max(1, rows // 2))
    width = width.at[:, -1].set(max(1, columns // 2))
    top, left = jnp.floor(tops * (rows - height + 1)), jnp.floor(lefts * (columns - width + 1))
    row, column = jnp.arange(rows), jnp.arange(columns)
    inside_rows = (row >= top[..., None]) & (row < (top + height)[..., None])
    inside_columns = (column >= left[..., None]) & (column < (left + width)[..., None])
    return inside_rows[..., :, None] & inside_columns[..., None, :]


def to_count(key, union, count: int) -> jax.Array:
    """Exactly `count` cells, bool [rows, columns]: those of the union, less its edge or plus its surroundings."""
    cells = jnp.pad(union.astype(jnp.float32), 1)
    near = jax.lax.reduce_window(cells, 0.0, jax.lax.add, (3, 3), (1, 1), "valid") / 9
    order = (2 * union + near).reshape(-1) + 0.01 * jax.random.uniform(key, (union.size,))
    chosen = jax.lax.top_k(order, count)[1]
    return jnp.zeros(union.size, bool).at[chosen].set(True).reshape(union.shape)


def draw(keys, grid: int, num_masks: int, scale, aspect, count: int | None) -> jax.Array:
    """Masks bool [batch, grid * grid], True = predict, one per key; each of `count` patches or as blocks fall."""

    def one(key):
        first, second = jax.random.split(key)
        union = block_union(first, grid, grid, num_masks, scale, aspect)
        return (union if count is None else to_count(second, union, count)).reshape(-1)

    return jax.vmap(one)(keys)


def largest_count(grid: int, num_masks: int, scale, aspect) -> int:
    """An upper bound of the patches that a ragged mask covers; at least one patch stays visible in the fixed ones."""
    aspect = (max(aspect[0], 0.85), min(aspect[1], 1.15))
    most = (grid // 2) ** 2
    for ratio in aspect:
        height = math.sqrt(scale[1] * grid * grid / ratio) + 0.5
        most = max(most, math.ceil(height) * math.ceil(height * ratio + 0.5))
    return min(grid * grid, num_masks * most)


def fixed_count(grid: int, num_masks: int, scale, ratio: float | None) -> int:
    """Patches of a fixed-count mask: `ratio` of the grid, or what the blocks cover on average."""
    share = num_masks * sum(scale) / 2 if ratio is None else ratio
    return min(max(1, round(share * grid * grid)), grid * grid - 1)
