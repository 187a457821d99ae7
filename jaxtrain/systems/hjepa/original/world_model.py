"""The original's world model and its planner as torch objects."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from jaxtrain.errors import UserError
from jaxtrain.nn.vit import vit_size
from jaxtrain.systems.hjepa import torch_twin
from jaxtrain.systems.hjepa.original.encoders import initialize


class FrameEncoder(torch_twin.FrameEncoder):
    """Encoder of frames [batch, channel, S, S] -> [batch, width]: a vision transformer's class token, projected."""

    def __init__(
        self,
        encoder_type: str = "vit_tiny_patch16_224",
        img_size: int = 224,
        embed_dim: int | None = None,
        projection_norm: str = "batchnorm",
        use_layerscale: bool = False,
        layerscale_init: float = 1e-5,
        *,
        vit: dict[str, Any] | None = None,
    ):
        """embed_dim, vit: as in LeWM. Raises ValueError for another embed_dim or projection_norm than are known."""
        size = vit_size(encoder_type, **(vit or {}))
        if embed_dim not in (None, size.embed_dim):
            raise UserError(f"embed_dim={embed_dim}, but {encoder_type} has {size.embed_dim}")
        if projection_norm not in torch_twin.NORMS:
            raise UserError(f"projection_norm={projection_norm!r} is unknown; known: {', '.join(torch_twin.NORMS)}")
        super().__init__(img_size, size, projection_norm, layerscale_init if use_layerscale else None)
        initialize(self.encoder)


class LeWM(torch_twin.LeWorldModel):
    """World model: frames [batch, step, channel, S, S], actions [batch, step, action] -> a dict, see `forward`."""

    def __init__(
        self,
        encoder_type: str = "vit_tiny_patch16_224",
        img_size: int = 224,
        embed_dim: int | None = None,
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
        vit: dict[str, Any] | None = None,
    ):
        """embed_dim: the encoder's width if left out. vit: timm-style overrides of the preset's sizes.
        torch.manual_seed determines the weights. Raises ValueError for sizes that do not fit each other."""
        from jaxtrain import config_io

        model = {
            "encoder_type": encoder_type,
            "vit": vit or {},
            "embed_dim": embed_dim,
            "action_dim": action_dim,
            "predictor_depth": predictor_depth,
            "predictor_num_heads": predictor_num_heads,
            "predictor_mlp_ratio": predictor_mlp_ratio,
            "predictor_dropout": predictor_dropout,
            "predictor_max_seq_len": predictor_max_seq_len,
            "projection_norm": projection_norm,
            "gradient_checkpointing": use_gradient_checkpointing,
            "layerscale": {"use_layerscale": use_layerscale, "init_value": layerscale_init},
        }
        values = {"task": "hjepa.world_model", "model": model, "data": {"image_size": img_size}}
        super().__init__(config_io.check(values, "create_lewm")[1])
        initialize(self.frame_encoder.encoder)

    def forward(self, frames, actions) -> dict[str, torch.Tensor]:
        """Return embeddings and predictions of frames and actions, and the pairs that a loss compares.

        embeddings, predictions: [batch, step, width]; prediction_inputs, target_embeddings: [batch, step - 1, width].
        Raises ValueError for other axes and more steps than predictor_max_seq_len.
        """
        if frames.ndim != 5 or actions.ndim != 3:
            raise UserError(
                f"frames have {frames.ndim} axes and actions {actions.ndim}, wanted [batch, step, channel, height, "
                "width] and [batch, step, action]"
            )
        if frames.shape[:2] != actions.shape[:2]:
            raise UserError(
                f"frames are [batch, step] = {list(frames.shape[:2])}, actions {list(actions.shape[:2])}: wanted equal"
            )
        longest = self.action_predictor.pos_embed.shape[1]
        if frames.shape[1] > longest:
            raise UserError(f"{frames.shape[1]} steps are more than predictor_max_seq_len={longest}")
        embeddings, predictions = super().forward(frames, actions)
        return {
            "embeddings": embeddings,
            "predictions": predictions,
            "prediction_inputs": predictions[:, :-1],
            "target_embeddings": embeddings[:, 1:],
        }


def create_lewm(*arguments: Any, **options: Any) -> LeWM:
    """Return LeWM(...) under the original's factory name."""
    return LeWM(*arguments, **options)


def goal_distance(trajectory, goal):
    """Return the squared distance of the last state to the goal: [plan]."""
    return (trajectory[:, -1] - goal).square().sum(-1)


@dataclasses.dataclass
class CEMPlanner:
    """Cross-entropy-method planner: sample plans, keep the cheapest, refit a normal distribution to them, repeat.

    encoder: frames [batch, channel, S, S] -> [batch, width]; predictor: (embeddings, actions) -> embeddings; both are
    put in evaluation mode while planning. Random numbers come from torch's generator. low, high: bounds of every
    action.
    cost_fn: (trajectory [plan, step, width], goal) -> [plan]. Source: Rubinstein 1999.
    """

    encoder: nn.Module
    predictor: nn.Module
    action_dim: int
    horizon: int = 10
    num_samples: int = 300
    num_elites: int = 30
    num_iterations: int = 30
    low: float = -1.0
    high: float = 1.0
    cost_fn: Callable = goal_distance

    @torch.no_grad()
    def plan(self, frame, goal_frame, return_plan: bool = False):
        """Return the first action [action] towards goal_frame, or with return_plan the whole plan [step, action].

        frame, goal_frame: [channel, S, S], or a batch of one.
        """
        modes = [(part, part.training) for part in (self.encoder, self.predictor)]
        try:
            for part, _ in modes:
                part.eval()
            start, goal = self.encoder(torch.stack([x.reshape(x.shape[-3:]) for x in (frame, goal_frame)]))
            mean = torch.full((self.horizon, self.action_dim), (self.low + self.high) / 2, device=start.device)
            std = torch.full_like(mean, (self.high - self.low) / 2)
            for _ in range(self.num_iterations):
                plans = mean + std * torch.randn(self.num_samples, *mean.shape, device=start.device)
                plans = plans.clamp(self.low, self.high)
                costs = self.cost_fn(self.rollout(start, plans), goal)
                elites = plans[costs.argsort()[: self.num_elites]]
                mean, std = elites.mean(0), elites.std(0).clamp(min=1e-3)
        finally:
            for part, training in modes:
                part.train(training)
        return mean if return_plan else mean[0]

    def rollout(self, start, actions):
        """Return embeddings [plan, step, width] that follow `start` [width] under plans [plan, step, action]."""
        states = start.expand(len(actions), 1, -1)
        for step in range(1, actions.shape[1]):
            states = torch.cat([states, self.predictor(states, actions[:, :step])[:, -1:]], dim=1)
        return self.predictor(states, actions)
