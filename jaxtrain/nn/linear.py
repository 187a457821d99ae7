"""Linear and embedding layers."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.nn import float8, initializers
from jaxtrain.nn.rows import rows
from jaxtrain.nn.scopes import named


class Identity(nnx.Module):
    def __call__(self, x, rngs=None):
        return x


class Linear(nnx.Module):
    """y = x W^T + b. weight: [out_features, in_features]; bias: [out_features]. Source: torch.nn.Linear."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, rngs: nnx.Rngs):
        self.weight = nnx.Param(initializers.linear_weight(rngs.params(), (out_features, in_features)))
        bound = 1 / math.sqrt(in_features)
        self.bias = nnx.Param(initializers.uniform(rngs.params(), (out_features,), bound)) if bias else None

    @named
    def __call__(self, x, rngs=None):
        return layer(x, self.weight[...], None if self.bias is None else self.bias[...])


def linear(x, weight, bias=None):
    """Compute x W^T + b. x: [..., in]; weight: [out, in]; bias: [out].

    The product contracts the last axes, so the weight is never transposed. It is computed in the weight's dtype, which
    the precision policy chooses.
    """
    y = jax.lax.dot_general(x.astype(weight.dtype), weight, (((x.ndim - 1,), (1,)), ((), ())))
    return y if bias is None else y + bias.astype(y.dtype)


def layer(x, weight, bias=None):
    """Compute `linear`, in 8 bits if the run's precision policy says so (nn.float8)."""
    if not float8.takes(x, weight):
        return linear(x, weight, bias)
    y = float8.product(x.astype(weight.dtype), weight)
    return y if bias is None else y + bias.astype(y.dtype)


class Embedding(nnx.Module):
    """Looks up rows of weight [num_embeddings, embedding_dim]. Row `padding_idx` starts at 0 and gets no gradient.

    Source: torch.nn.Embedding.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, *, rngs: nnx.Rngs):
        weight = initializers.normal(rngs.params(), (num_embeddings, embedding_dim), 1.0)
        if padding_idx is not None:
            padding_idx %= num_embeddings
            weight = weight.at[padding_idx].set(0)
        self.weight = nnx.Param(weight)
        self.padding_idx = padding_idx

    @named
    def __call__(self, ids):
        return embed(ids, self.weight[...], self.padding_idx)


def embed(ids, weight, padding_idx: int | None = None):
    """Look up rows of weight [rows, width] at int ids [...]: [..., width]. Row `padding_idx` gets no gradient."""
    found: Any = rows(weight, ids)
    if padding_idx is None:
        return found
    return jnp.where((ids == padding_idx)[..., None], jax.lax.stop_gradient(found), found)
