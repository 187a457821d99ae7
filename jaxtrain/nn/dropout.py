"""Dropout of elements and of residual branches."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxtrain.runtime import traced_hparams


class Dropout(nnx.Module):
    """Zero elements with probability `rate`, scale the rest by 1/(1-rate). Source: torch.nn.Dropout."""

    def __init__(self, rate: float):
        self.rate = rate

    def __call__(self, x, rngs=None):
        return dropout(x, self.rate, rngs)


def dropout(x, rate: float, rngs, broadcast_axes: tuple[int, ...] = ()):
    """Drop elements of x with one mask, shared along `broadcast_axes`. Returns x if `rngs` is None or rate is 0.

    The mask depends only on the key and the element's position, so it is the same on any number of devices and after a
    resume.
    """
    if rngs is None or rate == 0.0:
        return x
    shape = tuple(1 if axis in broadcast_axes else size for axis, size in enumerate(x.shape))
    kept = 1 - traced_hparams.current(rate)
    keep = bits(rngs(), shape) < threshold(kept)
    return jnp.where(keep, x / jnp.asarray(kept, x.dtype), jnp.zeros((), x.dtype))


def threshold(kept) -> jax.Array:
    """Return the uint32 that a random word is below with probability `kept`, accurate to 24 bits."""
    below = jnp.minimum(jnp.asarray(kept, jnp.float32) * np.float32(2.0**32), np.float32(2.0**32 - 2.0**8))
    return below.astype(jnp.uint32)


def bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draw uint32 words of a shape from a counter-based generator, so that each element is computed where it is used.

    A word depends on the key, its row (the row-major number over all axes but the last) and its column. Threefry needs
    ten times the operations, to give unrelated streams for any keys and counters; here every request has its own key,
    made by threefry.
    """
    *outer, last = shape or (1,)
    rows = jnp.arange(math.prod(outer), dtype=jnp.uint32).reshape(*outer, 1)
    start, stride = lax.optimization_barrier(of_rows(rows, *words(key)))  # once per row, not per element
    return of_columns(lax.broadcasted_iota(jnp.uint32, (*outer, last), len(outer)), start, stride).reshape(shape)


def words(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Split a key into its two words."""
    data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    return data[0], data[1]


def of_rows(rows, first, second):
    """Return each row's start and odd stride, uint32 like `rows`. first, second: the words of a key."""
    mixed = _finalised(rows + first)
    return _finalised(lax.bitwise_xor(mixed, second)), lax.bitwise_or(mixed, np.uint32(1))


def of_columns(columns, start, stride):
    """Return the random words at columns of rows with this start and stride."""
    return _finalised(start + columns * stride)


def _finalised(x):
    """Apply a bijection that scatters neighbouring numbers. Source: Wellons 2018 ("lowbias32"), the least biased one
    known with two multiplications."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = lax.bitwise_xor(x, lax.shift_right_logical(x, np.uint32(shift))) * np.uint32(factor)
    return lax.bitwise_xor(x, lax.shift_right_logical(x, np.uint32(16)))


class DropPath(nnx.Module):
    """Drop a residual branch for whole samples (stochastic depth). Source: Huang et al. 2016; timm DropPath."""

    def __init__(self, rate: float):
        self.rate = rate

    def __call__(self, x, rngs=None):
        return dropout(x, self.rate, rngs, broadcast_axes=tuple(range(1, x.ndim)))
