"""Dropout whose rate is an array, so that trials of a search that differ in it share one compiled step."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.nn import Carry


def rate_variable(rate: float) -> Carry:
    return Carry(jnp.float32(rate))


def drop(x, rate, rngs):
    """Zero elements with probability `rate` (float32 scalar array, or None for never), scale the rest by 1/(1-rate)."""
    if rngs is None or rate is None:
        return x
    keep = jax.random.bernoulli(rngs(), 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate).astype(x.dtype), jnp.zeros((), x.dtype))


class Dropout(nnx.Module):
    """Source: torch.nn.Dropout. `rate` is carried with the run, torch never sees it."""

    def __init__(self, rate: float):
        self.rate = rate_variable(rate)

    def __call__(self, x, rngs=None):
        return drop(x, self.rate[...], rngs)
