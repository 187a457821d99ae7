"""Activations by torch's names."""

import functools

import jax
import jax.numpy as jnp

gelu = functools.partial(jax.nn.gelu, approximate=False)  # torch's default is the exact one, flax's is not

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
