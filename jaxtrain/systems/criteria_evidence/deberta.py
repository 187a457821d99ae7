"""DeBERTa-v2 and v3 encoders: attention by content and by bucketed distance, no pooler. Source: He et al. 2021."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain import nn
from jaxtrain.nn.dropout import dropout
from jaxtrain.nn.remat import block
from jaxtrain.nn.rows import columns
from jaxtrain.systems.criteria_evidence.encoder_config import Encoder
from jaxtrain.systems.criteria_evidence.transformer_parts import (
    Encoding,
    Layer,
    Rates,
    Residual,
    activation,
    initialise,
    split_heads,
)


def relative_rows(tokens: int, config: Encoder) -> np.ndarray:
    """Return int [query, key]: the row of the relative-position table for every pair.

    With position_buckets, near distances have a row each and far distances share logarithmic buckets.
    """
    distance = np.arange(tokens)[:, None] - np.arange(tokens)[None, :]
    if config.position_buckets > 0:
        middle = config.position_buckets // 2
        size = np.where(np.abs(distance) < middle, middle - 1, np.abs(distance)).astype(np.float32)
        ratio = np.log(size / np.float32(middle)) / np.log(np.float32((config.relative_limit - 1) / middle))
        bucket = np.ceil(ratio * np.float32(middle - 1)) + middle
        distance = np.where(size <= middle, distance, bucket * np.sign(distance)).astype(np.int64)
    span = config.relative_span
    return np.clip(distance + span, 0, 2 * span - 1)


class Embeddings(nnx.Module):
    """Word embeddings (+ position) (+ type), optional projection, LayerNorm, multiplied by the mask, dropout."""

    def __init__(self, config: Encoder, *, rngs: nnx.Rngs):
        width = config.embedding_size or config.hidden_size
        table = lambda rows, pad=None: nn.Embedding(rows, width, pad, rngs=rngs)
        self.word_embeddings = table(config.vocab_size, config.pad_token_id)
        self.position_embeddings = table(config.max_position_embeddings) if config.position_biased_input else None
        self.token_type_embeddings = table(config.type_vocab_size) if config.type_vocab_size else None
        projected = width != config.hidden_size
        self.embed_proj = nn.Linear(width, config.hidden_size, bias=False, rngs=rngs) if projected else None
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def __call__(self, input_ids, mask, token_type_ids, rates: Rates, rngs=None):
        x = self.word_embeddings(input_ids)
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(jnp.arange(input_ids.shape[1])[None])
        if self.token_type_embeddings is not None:
            x = x + self.token_type_embeddings(jnp.zeros_like(input_ids) if token_type_ids is None else token_type_ids)
        if self.embed_proj is not None:
            x = self.embed_proj(x)
        x = self.LayerNorm(x)
        return dropout(x * mask[..., None].astype(x.dtype), rates.hidden, rngs)


class DisentangledAttention(nnx.Module):
    """Attention with weights softmax((q k + q pk[row] + k pq[row]) / sqrt(head width * (1 + number of position terms)))
    over the keys; pk and pq are the projected relative-position table."""

    def __init__(self, config: Encoder, *, rngs: nnx.Rngs):
        width = config.hidden_size
        project = lambda: nn.Linear(width, width, rngs=rngs)
        self.query_proj = project()
        self.key_proj = project()
        self.value_proj = project()
        separate = config.relative_attention and not config.share_att_key
        self.pos_key_proj = project() if separate and "c2p" in config.pos_att_type else None
        self.pos_query_proj = project() if separate and "p2c" in config.pos_att_type else None
        self.config = config

    def __call__(self, x, visible, rows, relative, rates: Rates, rngs=None):
        heads, kinds = self.config.num_attention_heads, self.config.pos_att_type
        projections = (self.query_proj, self.key_proj, self.value_proj)
        q, k, v = (split_heads(project(x, rngs=rngs), heads) for project in projections)
        scale = np.sqrt(q.shape[-1] * (1 + len(set(kinds))))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
        if relative is not None:
            relative = dropout(relative, rates.hidden, rngs)
            if "c2p" in kinds:
                project = self.pos_key_proj or self.key_proj
                keys = split_heads(project(relative, rngs=rngs), heads)
                near = jnp.einsum("bqhd,rhd->bhqr", q, keys).astype(jnp.float32)
                scores = scores + columns(near, rows)
            if "p2c" in kinds:
                project = self.pos_query_proj or self.query_proj
                queries = split_heads(project(relative, rngs=rngs), heads)
                near = jnp.einsum("bkhd,rhd->bhkr", k, queries).astype(jnp.float32)
                scores = scores + columns(near, rows.T).swapaxes(-1, -2)
        scores = jnp.where(visible, scores / scale, jnp.finfo(jnp.float32).min)
        weights = dropout(jax.nn.softmax(scores, axis=-1).astype(v.dtype), rates.attention, rngs)
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return y.reshape(*y.shape[:-2], -1)


class Attention(nnx.Module):
    def __init__(self, config: Encoder, *, rngs: nnx.Rngs):
        self.self = DisentangledAttention(config, rngs=rngs)
        self.output = Residual(config.hidden_size, config, rngs=rngs)

    def __call__(self, x, visible, rows, relative, rates: Rates, rngs=None):
        return self.output(self.self(x, visible, rows, relative, rates, rngs), x, rates, rngs)


class Convolution(nnx.Module):
    """Convolution over the embeddings, added to the output of the first layer (used by DeBERTa-v2-xlarge)."""

    def __init__(self, config: Encoder, *, rngs: nnx.Rngs):
        width, kernel = config.hidden_size, config.conv_kernel_size
        self.conv = nn.Conv1d(width, width, kernel, padding=(kernel - 1) // 2, groups=config.conv_groups, rngs=rngs)
        self.LayerNorm = nn.LayerNorm(width, config.layer_norm_eps)
        self.activation = activation(config.conv_act)

    def __call__(self, x, residual, mask, rates: Rates, rngs=None):
        mask = mask[..., None].astype(x.dtype)
        y = self.conv(x.swapaxes(1, 2)).swapaxes(1, 2) * (mask != 0)
        y = self.activation(dropout(y, rates.hidden, rngs))
        return self.LayerNorm(residual + y) * mask


class Layers(nnx.Module):
    def __init__(self, config: Encoder, *, rngs: nnx.Rngs):
        layers = [Layer(Attention(config, rngs=rngs), config, rngs=rngs) for _ in range(config.num_hidden_layers)]
        self.layer = nnx.List(layers)
        rows, width = 2 * config.relative_span, config.hidden_size
        self.rel_embeddings = nn.Embedding(rows, width, rngs=rngs) if config.relative_attention else None
        normed = "layer_norm" in [part.strip() for part in config.norm_rel_ebd.lower().split("|")]
        self.LayerNorm = nn.LayerNorm(width, config.layer_norm_eps) if normed else None
        self.conv = Convolution(config, rngs=rngs) if config.conv_kernel_size else None
        self.config = config

    def __call__(self, x, mask, rates: Rates, rngs=None):
        relative, rows = None, None
        if self.rel_embeddings is not None:
            relative = self.rel_embeddings.weight[...]
            if self.LayerNorm is not None:
                relative = self.LayerNorm(relative)
            rows = jnp.asarray(relative_rows(x.shape[1], self.config), jnp.int32)
        visible = (mask != 0)[:, None, None, :] & (mask != 0)[:, None, :, None]
        embedded = x
        for i, layer in enumerate(self.layer):
            x = block(layer, x, visible, rows, relative, rates=rates, rngs=rngs)
            if i == 0 and self.conv is not None:
                x = self.conv(embedded, x, mask, rates, rngs)
        return x


class DebertaEncoder(nnx.Module):
    """DeBERTa encoder with the arguments of BertEncoder; a padded query attends to all tokens equally, and `pooled` is
    None."""

    def __init__(self, config: Encoder, *, rngs: nnx.Rngs):
        self.embeddings = Embeddings(config, rngs=rngs)
        self.encoder = Layers(config, rngs=rngs)
        self.rates = Rates.of(config)
        initialise(self, config.initializer_range, rngs)

    def __call__(self, input_ids, attention_mask=None, token_type_ids=None, rngs=None) -> Encoding:
        rates = self.rates
        mask = jnp.ones_like(input_ids) if attention_mask is None else attention_mask
        hidden = self.embeddings(input_ids, mask, token_type_ids, rates, rngs)
        return Encoding(self.encoder(hidden, mask, rates, rngs), None)
