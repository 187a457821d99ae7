"""BERT, RoBERTa and XLM-R encoders: absolute positions, masked keys, and a pooler on the first token."""

import jax.numpy as jnp
from flax import nnx

from jaxtrain import nn
from jaxtrain.nn.dropout import dropout
from jaxtrain.nn.remat import block
from jaxtrain.nn.rows import permuted
from jaxtrain.systems.criteria_evidence.encoder_config import Encoder
from jaxtrain.systems.criteria_evidence.transformer_parts import (
    Encoding,
    Layer,
    Rates,
    Residual,
    initialise,
    split_heads,
)


class Embeddings(nnx.Module):
    """Word + type + position embeddings, LayerNorm, dropout. RoBERTa counts positions over non-padding tokens only."""

    def __init__(self, config: Encoder, *, rngs: nnx.Rngs):
        table = lambda rows, pad=None: nn.Embedding(rows, config.hidden_size, pad, rngs=rngs)
        roberta = config.kind == "roberta"
        self.pad = config.pad_token_id
        self.word_embeddings = table(config.vocab_size, config.pad_token_id)
        if not roberta:
            self.position_embeddings = table(config.max_position_embeddings)
        self.token_type_embeddings = table(config.type_vocab_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        if roberta:  # transformers registers it last; torch's optimizer state follows that order
            self.position_embeddings = table(config.max_position_embeddings, config.pad_token_id)
        self.from_ids = roberta

    def __call__(self, input_ids, token_type_ids, rates: Rates, rngs=None):
        types = jnp.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        x = self.word_embeddings(input_ids) + self.token_type_embeddings(types)
        x = x + self.position_embeddings(self.positions(input_ids))
        return dropout(self.LayerNorm(x), rates.hidden, rngs)

    def positions(self, input_ids):
        """Return the position ids, int [batch or 1, token]."""
        if not self.from_ids:
            return jnp.arange(input_ids.shape[1])[None]
        real = (input_ids != self.pad).astype(jnp.int32)
        return jnp.cumsum(real, axis=1) * real + self.pad


class SelfAttention(nnx.Module):
    def __init__(self, config: Encoder, *, rngs: nnx.Rngs):
        width = config.hidden_size
        self.query = nn.Linear(width, width, rngs=rngs)
        self.key = nn.Linear(width, width, rngs=rngs)
        self.value = nn.Linear(width, width, rngs=rngs)
        self.heads = config.num_attention_heads

    def __call__(self, x, lengths, rates: Rates, rngs=None):
        q, k, v = (split_heads(project(x, rngs=rngs), self.heads) for project in (self.query, self.key, self.value))
        y = nn.attention(q, k, v, lengths=lengths, dropout_rate=rates.attention, rngs=rngs)
        return y.reshape(*y.shape[:-2], -1)


class Attention(nnx.Module):
    def __init__(self, config: Encoder, *, rngs: nnx.Rngs):
        self.self = SelfAttention(config, rngs=rngs)
        self.output = Residual(config.hidden_size, config, rngs=rngs)

    def __call__(self, x, lengths, rates: Rates, rngs=None):
        return self.output(self.self(x, lengths, rates, rngs), x, rates, rngs)


class Layers(nnx.Module):
    def __init__(self, config: Encoder, *, rngs: nnx.Rngs):
        layers = [Layer(Attention(config, rngs=rngs), config, rngs=rngs) for _ in range(config.num_hidden_layers)]
        self.layer = nnx.List(layers)

    def __call__(self, x, lengths, rates: Rates, rngs=None):
        for layer in self.layer:
            x = block(layer, x, lengths, rates=rates, rngs=rngs)
        return x


class Pooler(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.dense = nn.Linear(width, width, rngs=rngs)

    def __call__(self, hidden):
        return jnp.tanh(self.dense(hidden[:, 0]))


class BertEncoder(nnx.Module):
    """BERT-family encoder that returns an Encoding.

    input_ids: int [batch, token]. attention_mask: [batch, token], 0 hides that key from every query; None shows all.
    token_type_ids: int [batch, token], None for zeros.
    """

    def __init__(self, config: Encoder, *, rngs: nnx.Rngs):
        self.embeddings = Embeddings(config, rngs=rngs)
        self.encoder = Layers(config, rngs=rngs)
        self.pooler = Pooler(config.hidden_size, rngs=rngs)
        self.rates = Rates.of(config)
        initialise(self, config.initializer_range, rngs)

    def __call__(self, input_ids, attention_mask=None, token_type_ids=None, rngs=None) -> Encoding:
        rates = self.rates
        hidden = self.embeddings(input_ids, token_type_ids, rates, rngs)
        if attention_mask is None:
            hidden = self.encoder(hidden, None, rates, rngs)
        else:
            # The layers do not depend on token order. With the visible tokens first, a length per row replaces a mask.
            mask = attention_mask != 0
            order, back = visible_first(mask)
            hidden = self.encoder(permuted(hidden, order, back), mask.sum(1, dtype=jnp.int32), rates, rngs)
            hidden = permuted(hidden, back, order)
        return Encoding(hidden, self.pooler(hidden))


def visible_first(mask):
    """Return two int [batch, token] permutations for a bool [batch, token] mask: one that puts the visible tokens
    first (keeping their order), and its inverse."""
    hidden_from = mask.sum(1, keepdims=True)
    back = jnp.where(mask, jnp.cumsum(mask, axis=1) - 1, hidden_from + jnp.cumsum(~mask, axis=1) - 1)
    places = jnp.broadcast_to(jnp.arange(mask.shape[1]), mask.shape)
    order = jnp.zeros_like(back).at[jnp.arange(len(mask))[:, None], back].set(places, unique_indices=True)
    return order, back
