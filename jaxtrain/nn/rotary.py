"""Rotary position embedding over a 2-D grid of patches."""

import jax.numpy as jnp
import numpy as np


def axis_angles(rows: int, columns: int, head_dim: int, theta: float = 10000.0):
    """Return the angles of every patch of the grid (row-major) on each axis: two float32 arrays [rows * columns,
    head_dim / 4].

    Frequency k is theta^(-2k / (head_dim / 2)). Raises ValueError if head_dim is not a multiple of 4.
    Source: Su et al. 2021, applied to rows and columns; specified for this system.
    """
    if head_dim % 4:
        raise ValueError(f"head_dim={head_dim} is not a multiple of 4, which rotation over two axes needs")
    frequencies = 1.0 / theta ** (np.arange(0, head_dim // 2, 2, dtype=np.float32) / np.float32(head_dim // 2))
    row, column = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    return tuple(
        jnp.asarray(np.outer(place.reshape(-1).astype(np.float32), frequencies.astype(np.float32)))
        for place in (row, column)
    )


def grid_table(rows: int, columns: int, head_dim: int, theta: float = 10000.0):
    """Return cos and sin, float32 [patch, head_dim / 2]: the first half is for the row, the second for the column."""
    angles = jnp.concatenate(axis_angles(rows, columns, head_dim, theta), axis=-1)
    return jnp.cos(angles), jnp.sin(angles)


def rotate_pairs(x, cos, sin):
    """Rotate the pairs (x[2i], x[2i+1]) of x [..., patch, head, head_dim] by cos, sin [..., patch, head_dim / 2]."""
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    cos, sin = cos[..., None, :].astype(x.dtype), sin[..., None, :].astype(x.dtype)
    turned = jnp.stack([first * cos - second * sin, first * sin + second * cos], axis=-1)
    return turned.reshape(x.shape)
