"""The predictor: from visible tokens to features of masked patches."""

import jax.numpy as jnp
from flax import nnx

from jaxtrain.nn import Activation, Dropout, DropPath, LayerNorm, Linear, MultiheadAttention, Sequential, gelu
from jaxtrain.nn.initializers import normal
from jaxtrain.nn.vit import call_block
from jaxtrain.systems.hjepa.initializers import STD


def mlp(width: int, hidden: int, dropout: float, rngs: nnx.Rngs) -> Sequential:
    """Linear, exact GELU, dropout, Linear, dropout, under the keys 0 and 3."""
    return Sequential(
        Linear(width, hidden, rngs=rngs),
        Activation(gelu),
        Dropout(dropout),
        Linear(hidden, width, rngs=rngs),
        Dropout(dropout),
    )


class PredictorBlock(nnx.Module):
    """Pre-norm block around torch's MultiheadAttention."""

    def __init__(
        self, width: int, num_heads: int, mlp_ratio: float, dropout: float, drop_path: float, *, rngs: nnx.Rngs
    ):
        self.norm1 = LayerNorm(width)
        self.attn = MultiheadAttention(width, num_heads, dropout, rngs=rngs)
        self.norm2 = LayerNorm(width)
        self.mlp = mlp(width, int(width * mlp_ratio), dropout, rngs)
        self.drop_path = DropPath(drop_path)

    def __call__(self, x, visible=None, rngs=None):
        """visible: bool [batch, token], the tokens that may be attended to; None: all."""
        ignored = None if visible is None else ~visible
        x = x + self.drop_path(self.attn(self.norm1(x), key_padding_mask=ignored, rngs=rngs), rngs)
        return x + self.drop_path(self.mlp(self.norm2(x), rngs=rngs), rngs)


class Predictor(nnx.Module):
    """Context tokens [batch, context, width] and places to fill -> features [batch, masked, width].

    A token to fill is `mask_token` plus the encoder's position of its patch, or plus `pos_embed_predictor` where no
    positions are given.
    """

    def __init__(
        self,
        embed_dim: int,
        depth: int = 6,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        drop_path_rate: float = 0.0,
        checkpointing: bool = False,
        *,
        rngs: nnx.Rngs,
    ):
        self.mask_token = nnx.Param(normal(rngs.params(), (1, 1, embed_dim), STD))
        self.pos_embed_predictor = nnx.Param(normal(rngs.params(), (1, 1, embed_dim), STD))
        rates = [drop_path_rate * i / max(1, depth - 1) for i in range(depth)]
        self.blocks = nnx.List(
            [PredictorBlock(embed_dim, num_heads, mlp_ratio, dropout, rate, rngs=rngs) for rate in rates]
        )
        self.norm = LayerNorm(embed_dim)
        self.head = Linear(embed_dim, embed_dim, rngs=rngs)
        self.checkpointing = checkpointing

    def __call__(self, context, indices, positions=None, present=None, rngs=None):
        """indices: int [batch, masked], patches to predict. positions: [1 or batch, patch, width].
        present: bool [batch, masked]; a token that is not present is hidden from all others."""
        token = self.mask_token[...]
        if positions is None:
            tokens = jnp.broadcast_to(token + self.pos_embed_predictor[...], (*indices.shape, token.shape[-1]))
        else:
            tokens = token + jnp.take(positions[0], indices, axis=0)
        x = jnp.concatenate([context, tokens.astype(context.dtype)], axis=1)
        visible = None
        if present is not None:
            visible = jnp.concatenate([jnp.ones(context.shape[:2], bool), present], axis=1)
        for block in self.blocks:
            x = call_block(block, x, visible, rngs, self.checkpointing)
        return self.head(self.norm(x[:, context.shape[1] :]))
