"""A plain decoder of any size with made-up data: what the plan is measured on."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from pydantic import Field

from jaxtrain import nn
from jaxtrain.config import Section
from jaxtrain.data.sources import ArraySource
from jaxtrain.losses import cross_entropy
from jaxtrain.task import Loss, Task


class Model(Section):
    width: int = Field(2048, ge=1)
    depth: int = Field(20, ge=1)
    heads: int = Field(16, ge=1)
    vocabulary: int = Field(32768, ge=1)
    length: int = Field(1024, ge=1)


class Block(nnx.Module):
    def __init__(self, config, *, rngs):
        width = config.width
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False, rngs=rngs)
        self.out = nn.Linear(width, width, bias=False, rngs=rngs)
        self.up = nn.Linear(width, 4 * width, bias=False, rngs=rngs)
        self.down = nn.Linear(4 * width, width, bias=False, rngs=rngs)
        self.heads = config.heads

    def __call__(self, x, rngs=None):
        q, k, v = jnp.split(self.qkv(self.norm1(x)), 3, axis=-1)
        q, k, v = (part.reshape(*part.shape[:2], self.heads, -1) for part in (q, k, v))
        x = x + self.out(nn.attention(q, k, v, causal=True).reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class Decoder(nnx.Module):
    def __init__(self, config, *, rngs):
        self.embed = nn.Embedding(config.vocabulary, config.width, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.depth)])
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False, rngs=rngs)

    def __call__(self, ids, rngs=None):
        x = self.embed(ids)
        for block in self.blocks:
            x = nn.block(block, x, rngs=rngs)
        return self.head(self.norm(x))


def loss(model, batch, config, rngs):
    logits = model(batch["ids"][:, :-1], rngs)
    valid = jnp.broadcast_to(batch["valid"][:, None], logits.shape[:2])
    return Loss(*cross_entropy(logits, batch["ids"][:, 1:], valid))


def build_data(config, split):
    ids = np.zeros((4096, config.model.length + 1), np.int32)
    return ArraySource({"ids": ids}) if split == "train" else None


TASKS = {
    "train": Task(
        sections={"model": Model},
        build_model=lambda config, rngs: Decoder(config.model, rngs=rngs),
        build_data=build_data,
        loss=loss,
    )
}
