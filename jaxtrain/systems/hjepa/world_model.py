"""LeWM: frames to embeddings, and the next embedding from the past and the actions.

Source: the world-model family of the torch original (docs/hjepa.md); conditioning as in DiT (Peebles & Xie 2023).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.nn import Activation, LayerNorm, Linear, MultiheadAttention, Sequential
from jaxtrain.nn.initializers import truncated_normal
from jaxtrain.nn.vit import Encoder, call_block, vit_size
from jaxtrain.systems.hjepa.initializers import STD
from jaxtrain.systems.hjepa.predictor import mlp
from jaxtrain.systems.hjepa.pyramid import Projection


class WorldOutputs(NamedTuple):
    """embeddings, predictions: [batch, step, width]; prediction t is of embedding t + 1.
    prediction_inputs, target_embeddings: the pairs to compare, [batch, step - 1, width]."""

    embeddings: jax.Array
    predictions: jax.Array
    prediction_inputs: jax.Array
    target_embeddings: jax.Array


class FrameEncoder(nnx.Module):
    """Class token of a ViT, projected. Frames [batch, channel, S, S] -> [batch, width]."""

    def __init__(self, img_size: int, size, norm: str, checkpointing: bool, *, rngs: nnx.Rngs):
        self.encoder = Encoder(img_size, size, checkpointing=checkpointing, rngs=rngs)
        self.projector = Projection(size.embed_dim, size.embed_dim, norm, rngs=rngs)

    def __call__(self, frames, rngs=None, keep=None):
        return self.projector(self.encoder(frames, rngs=rngs)[:, 0], rngs, keep)


class ModulatedBlock(nnx.Module):
    """A causal block whose shifts, scales and gates come from the step's action; it starts as the identity."""

    def __init__(self, width: int, num_heads: int, mlp_ratio: float, dropout: float, *, rngs: nnx.Rngs):
        self.norm = LayerNorm(width, affine=False)
        self.attn = MultiheadAttention(width, num_heads, dropout, rngs=rngs)
        self.mlp = mlp(width, int(width * mlp_ratio), dropout, rngs)
        self.modulation = Linear(width, 6 * width, rngs=rngs)
        self.modulation.weight.set_value(jnp.zeros(self.modulation.weight.shape))
        self.modulation.bias.set_value(jnp.zeros(self.modulation.bias.shape))

    def __call__(self, x, action, rngs=None):
        """x, action: [batch, step, width]."""
        scale1, shift1, gate1, scale2, shift2, gate2 = jnp.split(self.modulation(action), 6, axis=-1)
        h = self.norm(x) * (1 + scale1) + shift1
        x = x + gate1 * self.attn(h, causal=True, rngs=rngs)
        h = self.norm(x) * (1 + scale2) + shift2
        return x + gate2 * self.mlp(h, rngs=rngs)


class ActionPredictor(nnx.Module):
    """Embeddings [batch, step, width] and actions [batch, step, action] -> the next embedding of every step."""

    def __init__(
        self,
        embed_dim: int,
        action_dim: int,
        depth: int = 6,
        num_heads: int = 16,
        mlp_ratio: float = 4.0,
        dropout: float = 0.1,
        max_seq_len: int = 256,
        checkpointing: bool = False,
        *,
        rngs: nnx.Rngs,
    ):
        self.pos_embed = nnx.Param(truncated_normal(rngs.params(), (1, max_seq_len, embed_dim), STD))
        self.action_embed = Sequential(
            Linear(action_dim, embed_dim, rngs=rngs), Activation(jax.nn.silu), Linear(embed_dim, embed_dim, rngs=rngs)
        )
        self.blocks = nnx.List(
            [ModulatedBlock(embed_dim, num_heads, mlp_ratio, dropout, rngs=rngs) for _ in range(depth)]
        )
        self.final_norm = LayerNorm(embed_dim)
        self.head = Linear(embed_dim, embed_dim, rngs=rngs)
        self.max_seq_len = max_seq_len
        self.checkpointing = checkpointing

    def __call__(self, embeddings, actions, rngs=None):
        if embeddings.ndim != 3 or actions.ndim != 3:
            raise ValueError(
                f"wanted [batch, step, width], got embeddings {embeddings.shape} and actions {actions.shape}"
            )
        if embeddings.shape[:2] != actions.shape[:2]:
            raise ValueError(
                f"embeddings {embeddings.shape[:2]} and actions {actions.shape[:2]} differ in [batch, step]"
            )
        steps = embeddings.shape[1]
        if steps > self.max_seq_len:
            raise ValueError(f"{steps} steps are more than max_seq_len={self.max_seq_len}")
        x = embeddings + self.pos_embed[...][:, :steps].astype(embeddings.dtype)
        action = self.action_embed(actions)
        for block in self.blocks:
            x = call_block(block, x, action, rngs, self.checkpointing)
        return self.head(self.final_norm(x))


class LeWorldModel(nnx.Module):
    """The arguments and their defaults are the original's; `vit` overrides the preset's sizes."""

    def __init__(
        self,
        encoder_type: str = "vit_tiny_patch16_224",
        img_size: int = 224,
        embed_dim: int = 192,
        action_dim: int = 4,
        predictor_depth: int = 6,
        predictor_num_heads: int = 16,
        predictor_mlp_ratio: float = 4.0,
        predictor_dropout: float = 0.1,
        predictor_max_seq_len: int = 256,
        projection_norm: str = "batchnorm",
        use_gradient_checkpointing: bool = False,
        *,
        vit: dict | None = None,
        rngs: nnx.Rngs,
    ):
        size = vit_size(encoder_type, **(vit or {}))
        if size.embed_dim != embed_dim:
            raise ValueError(f"embed_dim={embed_dim} is not the encoder's width {size.embed_dim}")
        self.frame_encoder = FrameEncoder(img_size, size, projection_norm, use_gradient_checkpointing, rngs=rngs)
        self.action_predictor = ActionPredictor(
            embed_dim,
            action_dim,
            predictor_depth,
            predictor_num_heads,
            predictor_mlp_ratio,
            predictor_dropout,
            predictor_max_seq_len,
            use_gradient_checkpointing,
            rngs=rngs,
        )

    def encode(self, frames, rngs=None, valid=None):
        """Frames [batch, step, channel, S, S] -> embeddings [batch, step, width]. valid: bool [batch]."""
        batch, steps = frames.shape[:2]
        keep = None if valid is None else jnp.repeat(valid, steps)
        return self.frame_encoder(frames.reshape(batch * steps, *frames.shape[2:]), rngs, keep).reshape(
            batch, steps, -1
        )

    def __call__(self, frames, actions, rngs=None, valid=None) -> WorldOutputs:
        embeddings = self.encode(frames, rngs, valid)
        predictions = self.action_predictor(embeddings, actions, rngs)
        return WorldOutputs(embeddings, predictions, predictions[:, :-1], embeddings[:, 1:])
