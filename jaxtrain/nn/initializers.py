"""torch's default initialisations. All take a key, a shape and a dtype; shapes are torch's ([out, in, *kernel])."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

BLOCK = 1 << 20  # numbers; a CPU draws larger arrays in blocks of rows


def in_blocks(draw: Callable, key, shape):
    """draw(key, shape), on a CPU block of rows by block of rows where the array is large.

    There XLA keeps the generator's state for a whole array, two to three times the array's own memory; a GPU keeps it
    in registers. Blocks take keys of their own, so the two draw other numbers.
    """
    rows, columns = shape[0], math.prod(shape[1:])
    height = max(1, BLOCK // max(columns, 1))
    if rows <= height:
        return draw(key, shape)

    def blocks(key):
        def put(i, out):
            part = draw(jax.random.fold_in(key, i), (height, *shape[1:]))
            return jax.lax.dynamic_update_slice_in_dim(out, part, jnp.minimum(i * height, rows - height), 0)

        empty = jnp.zeros(shape, jax.eval_shape(lambda k: draw(k, (1,)), key).dtype)
        return jax.lax.fori_loop(0, -(-rows // height), put, empty)

    return jax.lax.platform_dependent(key, cpu=blocks, default=lambda key: draw(key, shape))


def uniform(key, shape, bound: float, dtype=jnp.float32):
    def draw(key, shape):
        if len(shape) > 2:  # the same numbers; XLA compiles the draw of many axes several times slower than that of one
            return jax.random.uniform(key, (math.prod(shape),), dtype, -bound, bound).reshape(shape)
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return in_blocks(draw, key, shape)


def linear_weight(key, shape, dtype=jnp.float32):
    """U(-1/sqrt(fan_in), 1/sqrt(fan_in)): torch.nn.Linear and Conv (kaiming_uniform with a = sqrt(5))."""
    return uniform(key, shape, 1 / math.sqrt(math.prod(shape[1:])), dtype)


def xavier_uniform(key, shape, dtype=jnp.float32):
    """Bound sqrt(6 / (fan_in + fan_out)): torch.nn.init.xavier_uniform_ of a matrix [out, in]."""
    return uniform(key, shape, math.sqrt(6 / (shape[0] + shape[1])), dtype)


def normal(key, shape, std: float, dtype=jnp.float32):
    return in_blocks(lambda key, shape: std * jax.random.normal(key, shape, dtype), key, shape)


def truncated_normal(key, shape, std: float, dtype=jnp.float32):
    """Normal cut at the absolute values -2 and 2: torch.nn.init.trunc_normal_ with its default a and b."""
    draw = lambda key, shape: std * jax.random.truncated_normal(key, -2 / std, 2 / std, shape, dtype)
    return in_blocks(draw, key, shape)
