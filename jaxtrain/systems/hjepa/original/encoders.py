"""The original's two encoders and its predictor as torch modules, with its arguments and attributes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from jaxtrain.errors import UserError
from jaxtrain.nn.vit import INIT_STD, ViTSize, vit_size
from jaxtrain.systems.hjepa import torch_twin
from jaxtrain.systems.hjepa.original.rope import VisionRoPE2D
from jaxtrain.systems.hjepa.torch_vit import Encoder


@torch.no_grad()
def initialize(module: nn.Module) -> None:
    """Draw weights as timm and the original do, from torch's generator; truncated normal 0.02 for Linear layers."""
    for _name, inner in module.named_modules():
        if isinstance(inner, nn.Linear):
            nn.init.trunc_normal_(inner.weight, std=INIT_STD)
            if inner.bias is not None:
                nn.init.zeros_(inner.bias)
        elif isinstance(inner, nn.LayerNorm):
            inner.reset_parameters()
        for key, parameter in inner.named_parameters(recurse=False):
            if key in ("pos_embed",):
                nn.init.trunc_normal_(parameter, std=INIT_STD)
            elif key == "cls_token":
                nn.init.normal_(parameter, std=1e-6)
            elif key in ("mask_token", "pos_embed_predictor"):
                nn.init.normal_(parameter, std=INIT_STD)


class _Encoder(Encoder):
    """Vision transformer under `vit`: images [batch, channel, S, S] -> tokens [batch, 1 + patch, width]."""

    def __init__(
        self,
        encoder_type: str = "vit_base_patch16_224",
        img_size: int = 224,
        pretrained: bool = False,
        drop_path_rate: float = 0.0,
        use_gradient_checkpointing: bool = False,
        use_rope: bool = False,
        rope_theta: float = 10000.0,
        use_flash_attention: bool = False,
        use_mps_optimization: bool = True,
        use_layerscale: bool = False,
        layerscale_init: float = 1e-5,
        *,
        vit: dict | None = None,
    ):
        """vit: timm-style overrides of the preset's sizes (patch_size, embed_dim, depth, num_heads, ...).

        use_gradient_checkpointing: recompute the blocks in the backward pass. use_flash_attention,
        use_mps_optimization: torch chooses the kernel.
        """
        check_not_pretrained(pretrained)
        size = vit_size(encoder_type, **(vit or {}))
        options = {
            "drop_path": drop_path_rate,
            "rope_theta": rope_theta if use_rope else None,
            "layerscale_init": layerscale_init if use_layerscale else None,
        }
        self._build(encoder_type, img_size, size, options)
        self.use_flash_attention, self.use_gradient_checkpointing = use_flash_attention, use_gradient_checkpointing
        initialize(self)

    @classmethod
    def of_size(cls, encoder_type: str, img_size: int, size: ViTSize, options: Mapping[str, Any]):
        """Return an encoder as HJEPA builds it, before its weights are drawn. options: of VisionTransformer."""
        module = cls.__new__(cls)
        module._build(encoder_type, img_size, size, options)
        return module

    def _build(self, encoder_type: str, img_size: int, size: ViTSize, options: Mapping[str, Any]) -> None:
        Encoder.__init__(self, img_size, size, **options)
        self.encoder_type, self.img_size, self.use_rope = encoder_type, img_size, options["rope_theta"] is not None
        self.embed_dim, self.patch_size, self.grid_size = size.embed_dim, size.patch_size, self.vit.grid
        self.num_patches, self.use_gradient_checkpointing = self.grid_size**2, False
        theta = options["rope_theta"]
        width = size.embed_dim // size.num_heads
        self.rope = None if theta is None else VisionRoPE2D(width, size.patch_size, self.grid_size, theta)
        self.use_layerscale, self.use_flash_attention = options["layerscale_init"] is not None, True

    def get_num_patches(self, img_size: int) -> int:
        """Return the number of patches of a square image of img_size pixels per side."""
        return (img_size // self.patch_size) ** 2

    def get_patch_size(self) -> int:
        """Return the side of a patch in pixels."""
        return self.patch_size


class ContextEncoder(_Encoder):
    """Encoder of the visible part of an image; patches where mask (bool [batch, patch]) is True are blanked."""

    def forward(self, x, mask=None, *, keep=None):
        """Return tokens [batch, 1 + patch, width] of images x. keep: only these patches, int [batch, kept]."""
        if self.use_gradient_checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(self.vit, x, mask, keep, use_reentrant=False)
        return self.vit(x, mask, keep)


class TargetEncoder(_Encoder):
    """Moving average of a context encoder. Its parameters take no gradient; `momentum` is that of the last update."""

    def __init__(
        self,
        encoder_type: str = "vit_base_patch16_224",
        img_size: int = 224,
        ema_momentum: float = 0.996,
        ema_momentum_end: float = 1.0,
        ema_warmup_steps: int = 1000,
        pretrained: bool = False,
        drop_path_rate: float = 0.0,
        use_rope: bool = False,
        rope_theta: float = 10000.0,
        use_flash_attention: bool = False,
        use_mps_optimization: bool = True,
        use_layerscale: bool = False,
        layerscale_init: float = 1e-5,
        *,
        vit: dict | None = None,
    ):
        super().__init__(
            encoder_type,
            img_size,
            pretrained,
            drop_path_rate,
            False,
            use_rope,
            rope_theta,
            use_flash_attention,
            use_mps_optimization,
            use_layerscale,
            layerscale_init,
            vit=vit,
        )
        self.set_momentum(ema_momentum, ema_momentum_end, ema_warmup_steps)
        self.requires_grad_(False)

    def set_momentum(self, start: float, end: float, warmup_steps: int) -> None:
        self.ema_momentum = self.momentum = start
        self.ema_momentum_end, self.ema_warmup_steps = end, warmup_steps

    @torch.no_grad()
    def forward(self, x):
        """Return tokens [batch, 1 + patch, width] of whole images x."""
        return self.vit(x)

    def momentum_at(self, step: int) -> float:
        """Return the momentum at a step: linear from ema_momentum at step 0 to ema_momentum_end at ema_warmup_steps."""
        return momentum_at(step, self.ema_momentum, self.ema_momentum_end, self.ema_warmup_steps)

    def update_from_context_encoder(self, context_encoder: nn.Module, current_step: int) -> float:
        """Set target <- m * target + (1 - m) * context and return m, the momentum at this step."""
        self.momentum = momentum = self.momentum_at(current_step)
        move(self, context_encoder, momentum)
        return momentum

    def copy_from_context_encoder(self, context_encoder: nn.Module) -> None:
        move(self, context_encoder, 0.0)


def momentum_at(step: int, start: float, end: float, warmup_steps: int) -> float:
    return start + (end - start) * (min(1.0, step / warmup_steps) if warmup_steps else 1.0)


@torch.no_grad()
def move(target: nn.Module, context: nn.Module, momentum: float) -> None:
    """Set target <- momentum * target + (1 - momentum) * context, over parameters in their order."""
    for theirs, ours in zip(context.parameters(), target.parameters(), strict=True):
        ours.mul_(momentum).add_(theirs, alpha=1 - momentum)


class Predictor(torch_twin.Predictor):
    """Predict features [batch, masked, width] of patches, int [batch, masked], from tokens [batch, context, width].

    Called with (context_features, mask_indices, pos_embed). pos_embed: positions [1, patch, width]; None for the
    parameter `pos_embed_predictor`.
    """

    def __init__(
        self,
        embed_dim: int,
        depth: int = 6,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        drop_path_rate: float = 0.0,
        use_gradient_checkpointing: bool = False,
    ):
        if embed_dim % num_heads:
            raise UserError(f"predictor: embed_dim {embed_dim} is not a multiple of num_heads {num_heads}")
        self._build(embed_dim, depth, num_heads, mlp_ratio, drop_path_rate, dropout)
        self.use_gradient_checkpointing = use_gradient_checkpointing
        initialize(self)

    @classmethod
    def of_size(cls, embed_dim: int, depth: int, num_heads: int, mlp_ratio: float, drop_path_rate: float):
        """Return a predictor as HJEPA builds it, before its weights are drawn."""
        module = cls.__new__(cls)
        module._build(embed_dim, depth, num_heads, mlp_ratio, drop_path_rate)
        return module

    def _build(
        self, embed_dim: int, depth: int, num_heads: int, mlp_ratio: float, drop_path_rate: float, dropout: float = 0.0
    ) -> None:
        torch_twin.Predictor.__init__(self, embed_dim, depth, num_heads, mlp_ratio, drop_path_rate, dropout)
        self.embed_dim, self.depth, self.num_heads = embed_dim, depth, num_heads
        self.use_gradient_checkpointing = False

    def forward(self, context_features, mask_indices, pos_embed=None):
        if self.use_gradient_checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(super().forward, context_features, mask_indices, pos_embed, use_reentrant=False)
        return super().forward(context_features, mask_indices, pos_embed)


def check_not_pretrained(pretrained: bool) -> None:
    if pretrained:
        raise UserError("pretrained=True downloads weights; give a run a file of timm's with model.encoder_weights")


def create_encoder(
    encoder_type: str = "vit_base_patch16_224",
    img_size: int = 224,
    pretrained: bool = False,
    drop_path_rate: float = 0.0,
    use_rope: bool = False,
    rope_theta: float = 10000.0,
    use_flash_attention: bool = False,
    use_mps_optimization: bool = True,
    use_layerscale: bool = False,
    layerscale_init: float = 1e-5,
    *,
    vit: dict | None = None,
    **ema: Any,
) -> tuple[ContextEncoder, TargetEncoder]:
    """Return (ContextEncoder, TargetEncoder), the target a copy. ema: TargetEncoder's ema_*."""
    options = {"pretrained": pretrained, "drop_path_rate": drop_path_rate, "use_rope": use_rope, "vit": vit}
    options |= {"rope_theta": rope_theta, "use_flash_attention": use_flash_attention}
    options |= {"use_mps_optimization": use_mps_optimization, "use_layerscale": use_layerscale}
    options |= {"layerscale_init": layerscale_init}
    context = ContextEncoder(encoder_type, img_size, **options)
    target = TargetEncoder(encoder_type, img_size, **options, **ema)
    target.copy_from_context_encoder(context)
    return context, target


def create_predictor(
    embed_dim: int,
    depth: int = 6,
    num_heads: int = 12,
    mlp_ratio: float = 4.0,
    dropout: float = 0.0,
    drop_path_rate: float = 0.0,
    use_gradient_checkpointing: bool = False,
) -> Predictor:
    """Return Predictor(...) under the original's factory name."""
    return Predictor(embed_dim, depth, num_heads, mlp_ratio, dropout, drop_path_rate, use_gradient_checkpointing)
