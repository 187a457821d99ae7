"""The original's world model and its planner as torch objects."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from jaxtrain.errors import UserError
from jaxtrain.nn.vit import overrides, vit_size
from jaxtrain.systems.hjepa import torch_twin
from jaxtrain.systems.hjepa.original.encoders import check_not_pretrained, initialize


class FrameEncoder(torch_twin.FrameEncoder):
    """Encoder of frames [batch, channel, S, S] -> [batch, width]: a vision transformer's class token, projected."""

    def __init__(
        self,
        encoder_type: str = "vit_tiny_patch16_224",
        img_size: int = 224,
        embed_dim: int | None = 192,
        pretrained: bool = False,
        drop_path_rate: float = 0.0,
        use_flash_attention: bool = False,
        use_layerscale: bool = False,
        projection_norm: str = "batchnorm",
        *,
        layerscale_init: float = 1e-5,
        vit: dict[str, Any] | None = None,
    ):
        """embed_dim: the encoder's width; None takes it. use_flash_attention: torch chooses the kernel. vit: timm-style
        overrides of the preset's sizes. Raises ValueError for another embed_dim or projection_norm than are known."""
        check_not_pretrained(pretrained)
        size = vit_size(encoder_type, **(vit or {}))
        if embed_dim not in (None, size.embed_dim):
            raise UserError(f"embed_dim={embed_dim}, but {encoder_type} has {size.embed_dim}")
        if projection_norm not in torch_twin.NORMS:
            raise UserError(f"projection_norm={projection_norm!r} is unknown; known: {', '.join(torch_twin.NORMS)}")
        scale = layerscale_init if use_layerscale else None
        super().__init__(img_size, size, projection_norm, scale, drop_path_rate)
        self.embed_dim = size.embed_dim
        initialize(self.encoder)


class ActionPredictor(torch_twin.ActionPredictor):
    """Predictor of each step's next embedding from embeddings [batch, step, width], actions [batch, step, action]."""


def create_action_predictor(
    embed_dim: int,
    action_dim: int,
    depth: int = 6,
    num_heads: int = 16,
    mlp_ratio: float = 4.0,
    dropout: float = 0.1,
    action_embed_dim: int | None = None,
    max_seq_len: int = 256,
) -> ActionPredictor:
    """Return ActionPredictor(...) under the original's factory name."""
    sizes = (depth, num_heads, mlp_ratio, dropout, action_embed_dim, max_seq_len)
    return ActionPredictor(embed_dim, action_dim, *sizes)


class LeWM(nn.Module):
    """World model: frames [batch, step, channel, S, S], actions [batch, step, action] -> a dict, see `forward`."""

    def __init__(self, frame_encoder: nn.Module, action_predictor: nn.Module, embed_dim: int, action_dim: int):
        """frame_encoder: frames [n, channel, S, S] -> [n, embed_dim]. action_predictor: an ActionPredictor."""
        super().__init__()
        self.frame_encoder, self.action_predictor = frame_encoder, action_predictor
        self.embed_dim, self.action_dim = embed_dim, action_dim

    def encode_sequence(self, frames) -> torch.Tensor:
        """Return the embeddings [batch, step, width] of frames [batch, step, channel, S, S]."""
        return self.frame_encoder(frames.flatten(0, 1)).reshape(*frames.shape[:2], -1)

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
        embeddings = self.encode_sequence(frames)
        predictions = self.action_predictor(embeddings, actions)
        return {
            "embeddings": embeddings,
            "predictions": predictions,
            "prediction_inputs": predictions[:, :-1],
            "target_embeddings": embeddings[:, 1:],
        }


def create_lewm(
    encoder_type: str = "vit_tiny_patch16_224",
    img_size: int = 224,
    embed_dim: int | None = 192,
    action_dim: int = 4,
    predictor_depth: int = 6,
    predictor_num_heads: int = 16,
    predictor_mlp_ratio: float = 4.0,
    predictor_dropout: float = 0.1,
    predictor_max_seq_len: int = 256,
    pretrained: bool = False,
    use_flash_attention: bool = False,
    use_layerscale: bool = False,
    projection_norm: str = "batchnorm",
    *,
    layerscale_init: float = 1e-5,
    vit: dict[str, Any] | None = None,
) -> LeWM:
    """Return a LeWM of a new FrameEncoder and ActionPredictor. vit: timm-style overrides of the preset's sizes.

    torch.manual_seed determines the weights. Raises ValueError for sizes that do not fit each other.
    """
    options = {"pretrained": pretrained, "use_flash_attention": use_flash_attention, "use_layerscale": use_layerscale}
    options |= {"projection_norm": projection_norm, "layerscale_init": layerscale_init, "vit": vit}
    encoder = FrameEncoder(encoder_type, img_size, embed_dim, **options)
    width = encoder.embed_dim
    if width % predictor_num_heads:
        raise UserError(f"embed_dim {width} is not a multiple of predictor_num_heads {predictor_num_heads}")
    predictor = ActionPredictor(
        width,
        action_dim,
        predictor_depth,
        predictor_num_heads,
        predictor_mlp_ratio,
        predictor_dropout,
        max_seq_len=predictor_max_seq_len,
    )
    return LeWM(encoder, predictor, width, action_dim)


def create_lewm_from_config(config: Mapping[str, Any]) -> LeWM:
    """Return a LeWM of the sizes in a nested config's `model` section, as a run of `hjepa.world_model` has them."""
    from jaxtrain import config_io
    from jaxtrain.systems.hjepa.original.legacy_config import world_model

    checked = config_io.check(world_model(config), "the original's config")[1]
    model = checked.model
    return create_lewm(
        model.encoder_type,
        checked.data.image_size,
        model.embed_dim,
        model.action_dim,
        model.predictor_depth,
        model.predictor_num_heads,
        model.predictor_mlp_ratio,
        model.predictor_dropout,
        model.predictor_max_seq_len,
        use_layerscale=model.layerscale.use_layerscale,
        projection_norm=model.projection_norm,
        layerscale_init=model.layerscale.init_value,
        vit=overrides(model.vit),
    )


def goal_distance(trajectory, goal):
    """Return the squared distance of the last state to the goal: [plan]."""
    return (trajectory[:, -1] - goal).square().sum(-1)


@dataclasses.dataclass
class CEMPlanner:
    """Cross-entropy-method planner: sample plans, keep the cheapest, refit a normal distribution to them, repeat.

    encoder: frames [batch, channel, S, S] -> [batch, width]; predictor: (embeddings, actions) -> embeddings; both are
    put in evaluation mode while planning. Random numbers come from torch's generator. action_low, action_high: bounds
    of every action. cost_fn: (trajectory [plan, step, width], goal) -> [plan]; the squared distance of the last state
    to the goal if None. Source: Rubinstein 1999.
    """

    encoder: nn.Module
    predictor: nn.Module
    action_dim: int
    horizon: int = 10
    num_samples: int = 300
    num_elites: int = 30
    num_iterations: int = 30
    action_low: float = -1.0
    action_high: float = 1.0
    cost_fn: Callable | None = None

    def __post_init__(self) -> None:
        self.cost_fn = goal_distance if self.cost_fn is None else self.cost_fn

    @torch.no_grad()
    def plan(self, initial_observation, goal_observation, return_full_sequence: bool = False):
        """Return the first action [action] towards the goal, or with return_full_sequence the plan [step, action].

        initial_observation, goal_observation: frames [channel, S, S], or a batch of one.
        """
        modes = [(part, part.training) for part in (self.encoder, self.predictor)]
        try:
            for part, _ in modes:
                part.eval()
            start, goal = self.encoder(
                torch.stack([x.reshape(x.shape[-3:]) for x in (initial_observation, goal_observation)])
            )
            mean = torch.full(
                (self.horizon, self.action_dim), (self.action_low + self.action_high) / 2, device=start.device
            )
            std = torch.full_like(mean, (self.action_high - self.action_low) / 2)
            for _ in range(self.num_iterations):
                plans = mean + std * torch.randn(self.num_samples, *mean.shape, device=start.device)
                plans = plans.clamp(self.action_low, self.action_high)
                costs = self.cost_fn(self.rollout(start, plans), goal)
                elites = plans[costs.argsort()[: self.num_elites]]
                mean, std = elites.mean(0), elites.std(0).clamp(min=1e-3)
        finally:
            for part, training in modes:
                part.train(training)
        return mean if return_full_sequence else mean[0]

    def rollout(self, start, actions):
        """Return embeddings [plan, step, width] that follow `start` [width] under plans [plan, step, action]."""
        states = start.expand(len(actions), 1, -1)
        for step in range(1, actions.shape[1]):
            states = torch.cat([states, self.predictor(states, actions[:, :step])[:, -1:]], dim=1)
        return self.predictor(states, actions)
