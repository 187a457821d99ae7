"""From token vectors to one vector per text."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain import nn
from jaxtrain.errors import UserError

POOLINGS = ("cls", "mean", "max", "attn")


class SequencePooler(nnx.Module):
    """hidden float [batch, token, width], mask [batch, token] (0 hides, None: all count) -> [batch, width].

    cls: the encoder's pooled output where it has one, else the first token. A text without any visible token gives 0
    for mean and attn, the smallest float for max, as in the original. Raises UserError for another pooling.
    """

    def __init__(self, width: int, pooling: str = "cls", *, rngs: nnx.Rngs):
        if pooling not in POOLINGS:
            raise UserError(f"Unsupported pooling '{pooling}', wanted one of {', '.join(POOLINGS)}")
        self.attention = nn.Linear(width, 1, rngs=rngs) if pooling == "attn" else None
        self.pooling = pooling

    def __call__(self, hidden, mask=None, pooled=None):
        if self.pooling == "cls":
            return hidden[:, 0] if pooled is None else pooled
        weight = jnp.ones(hidden.shape[:2]) if mask is None else mask
        if self.pooling == "mean":
            return masked_mean(hidden, weight, 1e-6)
        lowest = jnp.finfo(jnp.float32).min
        if self.pooling == "max":
            return first_maximum(jnp.where((weight != 0)[..., None], hidden, lowest))
        scores = self.attention(hidden)[..., 0].astype(jnp.float32)
        share = jax.nn.softmax(jnp.where(weight != 0, scores, lowest), axis=1)
        if mask is not None:
            share = share * weight.astype(share.dtype)
            share = share / (share.sum(axis=1, keepdims=True) + 1e-9)
        return jnp.einsum("bt,btd->bd", share.astype(hidden.dtype), hidden)


def first_maximum(x):
    """max over axis 1 of [batch, token, width]. The gradient goes to the place that was picked; that of jnp.max
    compares values again, which a fused recomputation may round otherwise."""
    return jnp.take_along_axis(x, jnp.argmax(x, axis=1, keepdims=True), axis=1)[:, 0]


def masked_mean(hidden, mask, least: float):
    """Mean over the tokens that count; `least` is the smallest divisor."""
    weight = mask.astype(jnp.float32)[..., None]
    mean = (hidden.astype(jnp.float32) * weight).sum(axis=1) / jnp.maximum(weight.sum(axis=1), least)
    return mean.astype(hidden.dtype)
