"""jax's random bit generator for CPUs as loop-free code: the same bits, without the loops that jax lowers it to.

A loop keeps the state of the whole array in memory and compiles to a dozen kernels. Loop-free code is fused into the
operations that use the bits, as on a GPU. Source: Salmon et al. 2011 (Threefry-2x32, 20 rounds).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA


@functools.cache  # installing again would trace it again
def install() -> None:
    """Use `threefry` in every program that this process compiles for a CPU from now on.

    A jax version without the imported names keeps its own code; the bits are the same.
    """
    try:
        from jax.extend.core.primitives import threefry2x32_p
        from jax.interpreters import mlir
    except ImportError:
        return
    once_a_shape = jax.jit(threefry)  # traced and lowered once per shape; XLA inlines it
    mlir.register_lowering(threefry2x32_p, mlir.lower_fun(once_a_shape, multiple_results=True), platform="cpu")


def threefry(key0, key1, x0, x1) -> tuple[jax.Array, jax.Array]:
    """Return two uint32 arrays of random bits from four that broadcast. Uses jax.lax: it traces three times as fast as
    jax.numpy."""
    shape = jnp.broadcast_shapes(*map(jnp.shape, (key0, key1, x0, x1)))
    keys = (key0, key1, lax.bitwise_xor(lax.bitwise_xor(key0, key1), np.uint32(PARITY)))
    *keys, x0, x1 = (jnp.broadcast_to(word, shape) for word in (*keys, x0, x1))
    x0, x1 = lax.add(x0, keys[0]), lax.add(x1, keys[1])
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            x0 = lax.add(x0, x1)
            high, low = lax.shift_left(x1, np.uint32(rotation)), lax.shift_right_logical(x1, np.uint32(32 - rotation))
            x1 = lax.bitwise_xor(x0, lax.bitwise_or(high, low))
        x0 = lax.add(x0, keys[(group + 1) % 3])
        x1 = lax.add(lax.add(x1, keys[(group + 2) % 3]), np.uint32(group + 1))
    return x0, x1
