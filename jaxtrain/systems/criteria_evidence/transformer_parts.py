"""Layers of BERT, RoBERTa and DeBERTa with transformers' attribute names, so state-dict keys need no translation.

Sources: Devlin et al. 2019; Liu et al. 2019; He et al. 2021; key names as in transformers 4.57 and 5.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain import nn
from jaxtrain.errors import UserError
from jaxtrain.nn.dropout import dropout
from jaxtrain.systems.criteria_evidence.encoder_config import Encoder


class Encoding(NamedTuple):
    """Encoder output. hidden: float [batch, token, width]. pooled: float [batch, width], None without a pooler."""

    hidden: jax.Array
    pooled: jax.Array | None


class Rates(NamedTuple):
    """The encoder's two dropout rates."""

    hidden: float
    attention: float

    @classmethod
    def of(cls, config: Encoder) -> "Rates":
        return cls(config.hidden_dropout_prob, config.attention_probs_dropout_prob)


def activation(name: str):
    """Return the activation of that name. Raises UserError for an unknown name."""
    if name not in nn.ACTIVATIONS:
        raise UserError(f"hidden_act: {name!r} is unknown, wanted one of {', '.join(nn.ACTIVATIONS)}")
    return nn.ACTIVATIONS[name]


class Residual(nnx.Module):
    """LayerNorm(dropout(dense(x)) + residual): the output half of attention and of the feed-forward layer."""

    def __init__(self, in_features: int, config: Encoder, *, rngs: nnx.Rngs):
        self.dense = nn.Linear(in_features, config.hidden_size, rngs=rngs)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def __call__(self, x, residual, rates: Rates, rngs=None):
        return self.LayerNorm(dropout(self.dense(x, rngs), rates.hidden, rngs) + residual)


class Intermediate(nnx.Module):
    def __init__(self, config: Encoder, *, rngs: nnx.Rngs):
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size, rngs=rngs)
        self.activation = activation(config.hidden_act)

    def __call__(self, x, rngs=None):
        return self.activation(self.dense(x, rngs))


class Layer(nnx.Module):
    """Post-norm transformer layer: attention, then the feed-forward half, both with residuals."""

    def __init__(self, attention: nnx.Module, config: Encoder, *, rngs: nnx.Rngs):
        self.attention = attention
        self.intermediate = Intermediate(config, rngs=rngs)
        self.output = Residual(config.intermediate_size, config, rngs=rngs)

    def __call__(self, x, *context, rates: Rates, rngs=None):
        x = self.attention(x, *context, rates=rates, rngs=rngs)
        return self.output(self.intermediate(x, rngs), x, rates, rngs)


def split_heads(x, heads: int):
    """Reshape [..., token, width] to [..., token, head, width / heads]."""
    return x.reshape(*x.shape[:-1], heads, -1)


def initialise(module: nnx.Module, std: float, rngs: nnx.Rngs) -> None:
    """Initialise as transformers' `_init_weights`: weights and embeddings from N(0, std), biases and padding rows 0."""
    for _, child in nnx.iter_modules(module):
        if isinstance(child, (nn.Linear, nn.Embedding, nn.Conv1d)):
            child.weight.set_value(std * jax.random.normal(rngs.params(), child.weight.shape))
            if getattr(child, "bias", None) is not None:
                child.bias.set_value(jnp.zeros(child.bias.shape))
        if isinstance(child, nn.Embedding) and child.padding_idx is not None:
            child.weight.set_value(child.weight[...].at[child.padding_idx].set(0))


POOLINGS = ("cls", "mean", "max", "attn")


class SequencePooler(nnx.Module):
    """Pooling of hidden [batch, token, width] to [batch, width]; mask [batch, token], 0 hides a token, None shows all.

    cls: the encoder's pooled output if it has one, else the first token. For a text without a visible token, mean and
    attn return 0 and max returns the smallest float, as in the original. Raises UserError for another pooling.
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
    """Return the maximum over axis 1 of [batch, token, width]; the gradient goes to the first maximum only.

    jnp.max's gradient compares the values again, and a fused recomputation may round them differently.
    """
    return jnp.take_along_axis(x, jnp.argmax(x, axis=1, keepdims=True), axis=1)[:, 0]


def masked_mean(hidden, mask, least: float):
    """Return the mean over the unmasked tokens; `least` is the smallest divisor."""
    weight = mask.astype(jnp.float32)[..., None]
    mean = (hidden.astype(jnp.float32) * weight).sum(axis=1) / jnp.maximum(weight.sum(axis=1), least)
    return mean.astype(hidden.dtype)
