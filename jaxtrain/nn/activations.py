"""Activations by torch's names."""

import functools
import math

import jax
import jax.numpy as jnp


def gelu(x: jax.Array) -> jax.Array:
    """x Phi(x), exact; Phi by erf, as torch computes it: jax.nn.gelu's erfc takes twice the time on a CPU.

    Source: Hendrycks & Gimpel 2016; torch.nn.functional.gelu.
    """
    return 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5)))


ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": gelu,
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
}
