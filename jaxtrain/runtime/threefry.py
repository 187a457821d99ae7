"""jax's generator of random bits on a CPU as straight code: the same bits, without the loops that jax lowers it to.

A loop keeps the state of the whole array in memory and is a dozen kernels to compile; straight code is fused into what
uses the bits, as on a GPU. Source: Salmon et al. 2011 (Threefry-2x32, 20 rounds).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA


@functools.cache  # a second lowering would be traced anew
def install() -> None:
    """For every program of this process that is compiled for a CPU from now on. A jax without these names keeps its
    own: the bits are the same."""
    try:
        from jax.extend.core.primitives import threefry2x32_p
        from jax.interpreters import mlir
    except ImportError:
        return
    once_a_shape = jax.jit(threefry)  # traced and lowered; XLA puts the code where it is called
    mlir.register_lowering(threefry2x32_p, mlir.lower_fun(once_a_shape, multiple_results=True), platform="cpu")


def threefry(key0, key1, x0, x1) -> tuple[jax.Array, jax.Array]:
    """uint32 arrays that broadcast -> two of bits. In jax.lax, which is traced in a third of jax.numpy's time."""
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
