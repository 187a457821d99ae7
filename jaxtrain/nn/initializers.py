"""torch's default initialisations. They take a key, a shape and a dtype; shapes are torch's ([out, in, *kernel])."""

import math

import jax
import jax.numpy as jnp


def uniform(key, shape, bound: float, dtype=jnp.float32):
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def linear_weight(key, shape, dtype=jnp.float32):
    """Draw from U(-1/sqrt(fan_in), 1/sqrt(fan_in)), as torch.nn.Linear and Conv (kaiming_uniform with a = sqrt(5))."""
    return uniform(key, shape, 1 / math.sqrt(math.prod(shape[1:])), dtype)


def xavier_uniform(key, shape, dtype=jnp.float32):
    """Draw uniformly with bound sqrt(6 / (fan_in + fan_out)): torch.nn.init.xavier_uniform_ of a matrix [out, in]."""
    return uniform(key, shape, math.sqrt(6 / (shape[0] + shape[1])), dtype)


def normal(key, shape, std: float, dtype=jnp.float32):
    return std * jax.random.normal(key, shape, dtype)


def truncated_normal(key, shape, std: float, dtype=jnp.float32):
    """Draw from a normal truncated at the absolute values -2 and 2: torch.nn.init.trunc_normal_ with its defaults."""
    return std * jax.random.truncated_normal(key, -2 / std, 2 / std, shape, dtype)
