"""LeWM world model: encode frames, and predict each next embedding from the past embeddings and actions.

Source: the world-model family of the torch original (docs/hjepa.md); conditioning as in DiT (Peebles & Xie 2023).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.nn import Activation, LayerNorm, Linear, MultiheadAttention, Sequential
from jaxtrain.nn.initializers import truncated_normal
from jaxtrain.nn.vit import INIT_STD, Encoder, call_block, overrides, vit_size
from jaxtrain.systems.hjepa.model import mlp
from jaxtrain.systems.hjepa.pyramid import Projection
from jaxtrain.systems.hjepa.regularizers import sigreg_statistic, slices
from jaxtrain.task import Loss, Statistics


class WorldOutputs(NamedTuple):
    """Outputs of the world model.

    embeddings, predictions: [batch, step, width]; prediction t is of embedding t + 1. prediction_inputs,
    target_embeddings: the pairs to compare, [batch, step - 1, width].
    """

    embeddings: jax.Array
    predictions: jax.Array
    prediction_inputs: jax.Array
    target_embeddings: jax.Array


class FrameEncoder(nnx.Module):
    """Projected class token of a ViT: frames [batch, channel, S, S] -> [batch, width]."""

    def __init__(
        self, img_size: int, size, norm: str, checkpointing: bool, layerscale_init: float | None, *, rngs: nnx.Rngs
    ):
        self.encoder = Encoder(img_size, size, checkpointing=checkpointing, layerscale_init=layerscale_init, rngs=rngs)
        self.projector = Projection(size.embed_dim, size.embed_dim, norm, rngs=rngs)

    def __call__(self, frames, rngs=None, keep=None):
        return self.projector(self.encoder(frames, rngs=rngs)[:, 0], rngs, keep)


class ModulatedBlock(nnx.Module):
    """Causal block whose shifts, scales and gates are computed from the step's action; it starts as the identity."""

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
    """Predict each step's next embedding from embeddings [batch, step, width] and actions [batch, step, action]."""

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
        self.pos_embed = nnx.Param(truncated_normal(rngs.params(), (1, max_seq_len, embed_dim), INIT_STD))
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
    """The world model. Arguments and defaults are the original's; `vit` overrides the preset's sizes."""

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
        use_layerscale: bool = False,
        layerscale_init: float = 1e-5,
        *,
        vit: dict | None = None,
        rngs: nnx.Rngs,
    ):
        size = vit_size(encoder_type, **(vit or {}))
        if size.embed_dim != embed_dim:
            raise ValueError(f"embed_dim={embed_dim} is not the encoder's width {size.embed_dim}")
        scale = layerscale_init if use_layerscale else None
        self.frame_encoder = FrameEncoder(img_size, size, projection_norm, use_gradient_checkpointing, scale, rngs=rngs)
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
        """Encode frames [batch, step, channel, S, S] as embeddings [batch, step, width].

        valid: bool [batch], samples that enter batch statistics.
        """
        batch, steps = frames.shape[:2]
        keep = None if valid is None else jnp.repeat(valid, steps)
        return self.frame_encoder(frames.reshape(batch * steps, *frames.shape[2:]), rngs, keep).reshape(
            batch, steps, -1
        )

    def __call__(self, frames, actions, rngs=None, valid=None) -> WorldOutputs:
        embeddings = self.encode(frames, rngs, valid)
        predictions = self.action_predictor(embeddings, actions, rngs)
        return WorldOutputs(embeddings, predictions, predictions[:, :-1], embeddings[:, 1:])


def build_model(config, rngs) -> LeWorldModel:
    model = config.model
    size = vit_size(model.encoder_type, **overrides(model.vit))
    return LeWorldModel(
        model.encoder_type,
        config.data.image_size,
        model.embed_dim or size.embed_dim,
        model.action_dim,
        model.predictor_depth,
        model.predictor_num_heads,
        model.predictor_mlp_ratio,
        model.predictor_dropout,
        model.predictor_max_seq_len,
        model.projection_norm,
        model.gradient_checkpointing,
        model.layerscale.use_layerscale,
        model.layerscale.init_value,
        vit=overrides(model.vit),
        rngs=rngs,
    )


def loss(model: LeWorldModel, batch, config, rngs) -> Loss:
    """Return the squared error of the predicted next embedding plus sigreg_weight times SIGReg of all embeddings.

    SIGReg uses the characteristic function. The target is not differentiated, as in the original's smoke script.
    """
    valid = batch["valid"]
    outputs = model(batch["frames"], batch["actions"], rngs, valid)
    targets = jax.lax.stop_gradient(outputs.target_embeddings).astype(jnp.float32)
    errors = jnp.square(outputs.prediction_inputs.astype(jnp.float32) - targets).mean((1, 2))
    weight = valid.sum().astype(jnp.float32)
    prediction = jnp.where(valid, errors, 0).sum() / jnp.maximum(weight, 1)
    rows = outputs.embeddings.reshape(-1, outputs.embeddings.shape[-1]).astype(jnp.float32)
    key = jax.random.key(0) if rngs is None else rngs()
    directions = slices(key, config.loss.sigreg_num_slices, rows.shape[-1])
    keep = jnp.repeat(valid, outputs.embeddings.shape[1])
    test = {"test_method": "char_function", "num_quadrature": config.loss.sigreg_num_quadrature}
    statistic = jnp.where(weight > 0, sigreg_statistic(rows, directions, keep=keep, **test), 0.0)
    value = prediction + config.loss.sigreg_weight * statistic
    return Loss(value, weight, {"prediction": prediction, "sigreg": statistic})


def outputs(model: LeWorldModel, batch):
    """Return embeddings and predictions, float [batch, step, width]."""
    result = model(batch["frames"], batch["actions"])
    return {"embeddings": result.embeddings, "predictions": result.predictions}


def eval_statistics(outputs, batch, config) -> Statistics:
    embeddings, predictions = outputs["embeddings"], outputs["predictions"]
    errors = jnp.square(predictions[:, :-1] - embeddings[:, 1:]).mean((1, 2))
    still = jnp.square(embeddings[:, :-1] - embeddings[:, 1:]).mean((1, 2))
    valid = batch["valid"]
    total = lambda values: jnp.where(valid, values, 0).sum()
    return Statistics(sums={"error": total(errors), "still": total(still), "count": valid.sum()})


def compute(sums, rows, config) -> dict[str, float]:
    """Return prediction_error, the mean squared error, and error_ratio, its ratio to the error of predicting no change.

    An error_ratio below 1 means that the model has learned.
    """
    return {
        "prediction_error": float(sums["error"]) / max(float(sums["count"]), 1),
        "error_ratio": float(sums["error"]) / max(float(sums["still"]), 1e-12),
    }


def rollout(predictor, start, actions):
    """Return embeddings [plan, step, width] that follow `start` [width] under plans of actions [plan, step, action].

    The predictor's last output is fed back as the next embedding; one final pass over all steps gives the result.
    """
    plans, steps = actions.shape[:2]
    states = jnp.broadcast_to(start, (plans, 1, start.shape[-1]))
    for step in range(1, steps):
        following = predictor(states, actions[:, :step])[:, -1:]
        states = jnp.concatenate([states, following], axis=1)
    return predictor(states, actions)


def goal_distance(trajectory, goal):
    """Return the squared distance of the last state to the goal: [plan]."""
    return jnp.square(trajectory[:, -1] - goal).sum(-1)
