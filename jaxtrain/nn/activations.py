"""Activation functions by torch's names."""

import functools
import math

import jax
import jax.numpy as jnp


def gelu(x: jax.Array) -> jax.Array:
    """Compute 0.5 x (1 + erf(x / sqrt 2)) for any shape, at least in float32. jax.nn.gelu uses erfc, which takes two to
    four times as long on a CPU. Source: torch.nn.functional.gelu, whose default is the exact form."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (0.5 * wide * (1 + jax.lax.erf(wide * math.sqrt(0.5)))).astype(x.dtype)


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
