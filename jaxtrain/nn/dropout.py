"""Dropout of elements and of residual branches."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.runtime import traced_hparams


class Dropout(nnx.Module):
    """Zero elements with probability `rate`, scale the rest by 1/(1-rate). Source: torch.nn.Dropout."""

    def __init__(self, rate: float):
        self.rate = rate

    def __call__(self, x, rngs=None):
        return dropout(x, self.rate, rngs)


def dropout(x, rate: float, rngs, broadcast_axes: tuple[int, ...] = ()):
    """One mask per element, shared along `broadcast_axes`. `rngs=None` or rate 0 returns x."""
    if rngs is None or rate == 0.0:
        return x
    shape = [1 if axis in broadcast_axes else size for axis, size in enumerate(x.shape)]
    kept = 1 - traced_hparams.current(rate)
    keep = jax.random.bernoulli(rngs(), kept, tuple(shape))
    return jnp.where(keep, x / jnp.asarray(kept, x.dtype), jnp.zeros((), x.dtype))


class DropPath(nnx.Module):
    """Drop a residual branch for whole samples (stochastic depth). Source: Huang et al. 2016; timm DropPath."""

    def __init__(self, rate: float):
        self.rate = rate

    def __call__(self, x, rngs=None):
        return dropout(x, self.rate, rngs, broadcast_axes=tuple(range(1, x.ndim)))
