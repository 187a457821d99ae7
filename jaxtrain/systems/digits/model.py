"""A small vision transformer: pre-norm, mean-pooled, with one convolution before the patches.

Sources: Dosovitskiy et al. 2021; Xiao et al. 2021, "Early convolutions help transformers see better".
"""

import jax.numpy as jnp
from flax import nnx

from jaxtrain import nn
from jaxtrain.nn import initializers


class Block(nnx.Module):
    def __init__(self, width: int, heads: int, mlp_ratio: float, dropout: float, *, rngs: nnx.Rngs):
        self.norm1 = nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, rngs=rngs)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, int(width * mlp_ratio), rngs=rngs)
        self.fc2 = nn.Linear(int(width * mlp_ratio), width, rngs=rngs)
        self.dropout = nn.Dropout(dropout)

    def __call__(self, x, rngs=None):
        x = x + self.dropout(self.attn(self.norm1(x), rngs=rngs), rngs)
        return x + self.dropout(self.fc2(nn.gelu(self.fc1(self.norm2(x)))), rngs)


class DigitsViT(nnx.Module):
    """Vision transformer: image float [batch, 1, 8, 8] -> logits [batch, 10]."""

    def __init__(self, config, *, rngs: nnx.Rngs):
        width, patches = config.embed_dim, (8 // config.patch_size) ** 2
        self.stem = nn.Conv2d(1, width // 2, 3, padding=1, rngs=rngs)
        self.patch_embed = nn.Conv2d(width // 2, width, config.patch_size, stride=config.patch_size, rngs=rngs)
        self.pos_embed = nnx.Param(initializers.truncated_normal(rngs.params(), (1, patches, width), 0.02))
        self.blocks = nnx.List(
            [Block(width, config.num_heads, config.mlp_ratio, config.dropout, rngs=rngs) for _ in range(config.depth)]
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10, rngs=rngs)

    def __call__(self, image, rngs=None):
        x = self.patch_embed(nn.gelu(self.stem(image)))
        x = x.reshape(*x.shape[:2], -1).swapaxes(1, 2) + self.pos_embed[...]
        for block in self.blocks:
            x = nn.block(block, x, rngs)
        return self.head(jnp.mean(self.norm(x), axis=1))


def build_model(config, rngs: nnx.Rngs) -> DigitsViT:
    return DigitsViT(config.model, rngs=rngs)
