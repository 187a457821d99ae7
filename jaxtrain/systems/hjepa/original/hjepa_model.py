"""The original's HJEPA as a torch module, with the same arguments, attributes, methods and results."""

import inspect
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from jaxtrain.errors import UserError
from jaxtrain.nn.vit import overrides, vit_size
from jaxtrain.systems.hjepa import torch_twin
from jaxtrain.systems.hjepa.config import ModelConfig
from jaxtrain.systems.hjepa.original.encoders import (
    ContextEncoder,
    Predictor,
    TargetEncoder,
    check_not_pretrained,
    initialize,
    momentum_at,
    move,
)
from jaxtrain.systems.hjepa.torch_twin import pool


class HJEPA(torch_twin.HJEPA):
    """A context encoder, a target encoder (its moving average), a predictor, and 2 to 4 hierarchy levels.

    Arguments and defaults are the original's; those after the bare `*` are additions. vit: timm-style overrides of the
    preset's sizes. use_rope: rotary positions in both encoders. copy_target_at_init: start the target as a copy, as the
    original's documentation promises; its code redraws the target's Linear weights. Raises ValueError for sizes that do
    not fit. torch.manual_seed determines the weights.
    """

    def __init__(
        self,
        encoder_type: str = "vit_base_patch16_224",
        img_size: int = 224,
        embed_dim: int | None = 768,
        predictor_depth: int = 6,
        predictor_num_heads: int = 12,
        predictor_mlp_ratio: float = 4.0,
        num_hierarchies: int = 3,
        ema_momentum: float = 0.996,
        ema_momentum_end: float = 1.0,
        ema_warmup_steps: int = 1000,
        pretrained: bool = False,
        drop_path_rate: float = 0.0,
        use_fpn: bool = False,
        fpn_feature_dim: int | None = None,
        fpn_fusion_method: str = "add",
        use_gradient_checkpointing: bool = False,
        use_layerscale: bool = False,
        layerscale_init: float = 1e-5,
        use_flash_attention: bool = True,
        use_target_encoder: bool = True,
        projection_norm: str = "layernorm",
        *,
        vit: Mapping[str, Any] | None = None,
        use_rope: bool = False,
        rope_theta: float = 10000.0,
        copy_target_at_init: bool = True,
    ):
        check_not_pretrained(pretrained)
        if not 2 <= num_hierarchies <= 4:
            raise UserError(f"num_hierarchies: {num_hierarchies} is not 2, 3 or 4")
        section = ModelConfig(
            encoder_type=encoder_type,
            vit=dict(vit or {}),
            embed_dim=embed_dim,
            num_hierarchies=num_hierarchies,
            predictor={"depth": predictor_depth, "num_heads": predictor_num_heads, "mlp_ratio": predictor_mlp_ratio},
            fpn={"use_fpn": use_fpn, "feature_dim": fpn_feature_dim, "fusion_method": fpn_fusion_method},
            layerscale={"use_layerscale": use_layerscale, "init_value": layerscale_init},
            rope={"use_rope": use_rope, "theta": rope_theta},
            projection_norm=projection_norm,
            use_target_encoder=use_target_encoder,
            drop_path_rate=drop_path_rate,
            gradient_checkpointing=use_gradient_checkpointing,
        )
        self._build(section, img_size, ema_momentum, ema_momentum_end, ema_warmup_steps)
        self.use_flash_attention = use_flash_attention
        initialize(self)
        if self.target_encoder is not None and copy_target_at_init:
            move(self.target_encoder, self.context_encoder, 0.0)

    def _build(self, section: ModelConfig, img_size: int, start: float, end: float, warmup_steps: int) -> None:
        size = vit_size(section.encoder_type, **overrides(section.vit))
        if section.embed_dim not in (None, size.embed_dim):
            raise UserError(
                f"embed_dim: {section.embed_dim} is not the encoder's width {size.embed_dim}; leave it out or match"
            )
        torch_twin.HJEPA.__init__(
            self, types.SimpleNamespace(model=section, data=types.SimpleNamespace(image_size=img_size))
        )
        if not section.use_target_encoder:
            self.target_encoder = None
        self.img_size = img_size
        self.embed_dim, self.num_hierarchies = size.embed_dim, section.num_hierarchies
        self.encoder_type, self.use_target_encoder = section.encoder_type, section.use_target_encoder
        self.ema_momentum, self.ema_momentum_end, self.ema_warmup_steps = start, end, warmup_steps
        if self.target_encoder is not None:
            self.target_encoder.set_momentum(start, end, warmup_steps)
        self.fpn_fusion_method = section.fpn.fusion_method
        self.fpn_feature_dim = section.fpn.feature_dim or size.embed_dim
        self.projection_norm = section.projection_norm
        self.use_gradient_checkpointing = section.gradient_checkpointing
        self.predictor_depth, self.drop_path_rate = section.predictor.depth, section.drop_path_rate
        self.use_layerscale, self.layerscale_init = section.layerscale.use_layerscale, section.layerscale.init_value
        self.hierarchy_pooling = nn.ModuleList(
            nn.AvgPool1d(1 << level, 1 << level) if level else nn.Identity() for level in range(self.levels)
        )

    def _new_encoder(self, role, config, size, options):
        kind = {"context": ContextEncoder, "target": TargetEncoder}[role]
        return kind.of_size(config.model.encoder_type, config.data.image_size, size, options)

    def _new_predictor(self, width, model):
        sizes = model.predictor
        predictor = Predictor.of_size(width, sizes.depth, sizes.num_heads, sizes.mlp_ratio, model.drop_path_rate)
        predictor.use_gradient_checkpointing = model.gradient_checkpointing
        return predictor

    def forward(self, images, mask, return_all_levels: bool = True) -> dict[str, Any]:
        """Predict the target features of the masked patches.

        images: [batch, channel, S, S]. mask: bool, int or float [batch, patch], 1 = predict.

        Returns predictions, targets and masks_valid (per level [batch, token, width], and bool [batch, token]), and
        context_features and target_features [batch, 1 + patch, width]. Rows with fewer masked patches than the fullest
        are padded with patch 0; masks_valid marks the real ones. return_all_levels=False: one level without projection,
        and mask_valid. Raises ValueError if too few patches are masked for the levels, or none.
        """
        indices, valid = self.masked_patches(mask, self.levels if return_all_levels else 1)
        return self.forward_indices(images, mask, indices, valid, return_all_levels)

    def masked_patches(self, mask, levels: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ascending masked patches of each row and which are real: int, bool [batch, masked].

        Rows are padded with 0 to the largest count in the batch. levels: pooling levels that the count must suffice
        for; the model's if left out.
        """
        levels = self.levels if levels is None else levels
        hidden = mask > 0.5 if mask.dtype is not torch.bool else mask
        counts = hidden.sum(1)
        most = int(counts.max()) if len(counts) else 0
        if most < 1 << (levels - 1):
            raise UserError(
                f"mask: at most {most} patches of an image are masked, {levels} level{'s' * (levels > 1)} "
                f"want{'s' * (levels == 1)} {1 << levels - 1}"
            )
        order = hidden.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]
        valid = torch.arange(most, device=mask.device) < counts[:, None]
        return torch.where(valid, order, 0), valid

    def forward_indices(self, images, mask, indices, valid, return_all_levels: bool = True) -> dict[str, Any]:
        """Run `forward` on the results of `masked_patches`; it compiles, because no shape depends on a value."""
        context = self.encode_context(images, mask)
        targets = self.encode_target(images)
        positions = self.context_encoder.vit.pos_embed[:, 1:]
        predicted = self.predictor(context[:, 1:], indices, positions)
        masked_targets = targets[:, 1:].gather(1, indices[..., None].expand(-1, -1, targets.shape[-1]))
        features = {"context_features": context, "target_features": targets}
        if not return_all_levels:
            return {"predictions": [predicted], "targets": [masked_targets], "mask_valid": valid, **features}
        return {
            "predictions": self.project(predicted),
            "targets": self.project(masked_targets),
            "masks_valid": self._validity(valid),
            **features,
        }

    def _validity(self, valid) -> list[torch.Tensor]:
        """Return which entries of each level are real; a pyramid sends the mask through its layers, as originally."""
        if not self.use_fpn:
            return [pool(valid.float()[..., None], level)[..., 0] > 0.5 for level in range(self.levels)]
        tokens = valid.float()[..., None].expand(-1, -1, self.embed_dim)
        return [x.mean(-1) > 0.5 for x in self.pyramid(tokens)]

    def encode_context(self, images, mask=None):
        """Return the tokens [batch, 1 + patch, width] of the context encoder, with masked patches blanked."""
        return self.context_encoder(images, mask)

    @torch.no_grad()
    def extract_features(self, images, level: int = 0, use_target_encoder: bool = True):
        """Return features [batch, patch // 2^level, width] of whole images. Raises ValueError for an unknown level."""
        if not 0 <= level < self.levels:
            raise UserError(f"level={level} is outside [0, {self.levels})")
        encoder = self.target_encoder if use_target_encoder and self.has_target else self.context_encoder
        return self.level_features(encoder(images)[:, 1:], level)

    def update_target_encoder(self, current_step: int) -> float:
        """Move the target towards the context encoder; return the momentum of this step, 1.0 without a target."""
        if self.target_encoder is None:
            return 1.0
        momentum = momentum_at(current_step, self.ema_momentum, self.ema_momentum_end, self.ema_warmup_steps)
        move(self.target_encoder, self.context_encoder, momentum)
        return momentum

    def get_num_patches(self) -> int:
        return self.context_encoder.vit.grid**2

    def get_patch_size(self) -> int:
        return self.context_encoder.vit.size.patch_size


def create_hjepa(*arguments: Any, **options: Any) -> HJEPA:
    """Return HJEPA(...) under the original's factory name."""
    return HJEPA(*arguments, **options)


create_hjepa.__signature__ = inspect.signature(HJEPA)  # type: ignore[attr-defined]


def create_model(config: Mapping[str, Any]) -> HJEPA:
    """Build the original's HJEPA from its nested config. torch.manual_seed determines the weights.

    Only `model`, data.image_size and, of `training`, drop_path_rate and use_gradient_checkpointing are read. As in the
    original, an epoch of `momentum_warmup_epochs` is 1,000 steps of `update_target_encoder`.
    """
    from jaxtrain.systems.hjepa.original.datasets import checked

    model, training, data = (config.get(name) or {} for name in ("model", "training", "data"))
    options = {name: value for name, value in model.items() if name != "ema"}  # read below: no step count is known here
    read = {name: training[name] for name in ("drop_path_rate", "use_gradient_checkpointing") if name in training}
    image = {"image_size": data["image_size"]} if "image_size" in data else {}
    settings = checked({"model": options, "training": read, "data": image})
    section, ema = settings.model, model.get("ema") or {}
    return HJEPA(
        section.encoder_type,
        settings.data.image_size,
        section.embed_dim,
        section.predictor.depth,
        section.predictor.num_heads,
        section.predictor.mlp_ratio,
        section.num_hierarchies,
        ema.get("momentum", 0.996),
        ema.get("momentum_end", 1.0),
        1000 * ema.get("momentum_warmup_epochs", 30),
        drop_path_rate=section.drop_path_rate,
        use_fpn=section.fpn.use_fpn,
        fpn_feature_dim=section.fpn.feature_dim,
        fpn_fusion_method=section.fpn.fusion_method,
        use_gradient_checkpointing=section.gradient_checkpointing,
        use_layerscale=section.layerscale.use_layerscale,
        layerscale_init=section.layerscale.init_value,
        use_flash_attention=model.get("use_flash_attention", True),
        use_target_encoder=section.use_target_encoder,
        projection_norm=section.projection_norm,
        vit=overrides(section.vit),
        use_rope=section.rope.use_rope,
        rope_theta=section.rope.theta,
    )


create_hjepa_model = create_hjepa_from_config = create_model  # the names in the README's example and in the code
