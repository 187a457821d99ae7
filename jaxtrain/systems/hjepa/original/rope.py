"""The original's rotary position embedding of patches on a grid, as a torch module."""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from jaxtrain.errors import UserError


class VisionRoPE2D(nn.Module):
    """Rotate queries and keys [batch, head, patch, dim] by angles of their row and column.

    dim: width of a head, a multiple of 4 (else ValueError). Pair k of the first half of dim is rotated by row *
    theta^(-2k / (dim / 2)), pair k of the second half likewise by the column. Source: Su et al. 2021, on two axes.
    """

    def __init__(self, dim: int, patch_size: int = 16, num_patches_per_side: int = 14, theta: float = 10000.0):
        super().__init__()
        if dim % 4:
            raise UserError(f"dim: {dim} is not a multiple of 4, which rows and columns of pairs need")
        self.dim, self.patch_size, self.theta = dim, patch_size, theta
        self.num_patches_per_side = num_patches_per_side
        frequencies = 1.0 / theta ** (torch.arange(0, dim // 2, 2) / (dim // 2))
        self.register_buffer("frequencies", frequencies, persistent=False)
        rows, columns = self._angles(num_patches_per_side, num_patches_per_side)
        self.register_buffer("freqs_h", rows, persistent=False)
        self.register_buffer("freqs_w", columns, persistent=False)

    def _angles(self, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the angles of rows and of columns: float [patch, dim / 4] each, row-major."""
        device = self.frequencies.device
        rows = torch.arange(height, device=device, dtype=torch.float32).repeat_interleave(width)
        columns = torch.arange(width, device=device, dtype=torch.float32).repeat(height)
        return torch.outer(rows, self.frequencies), torch.outer(columns, self.frequencies)

    def forward(self, q, k, num_patches_h: int | None = None, num_patches_w: int | None = None):
        """Return the rotated queries and keys. num_patches_h, num_patches_w: a grid other than the constructor's."""
        rows, columns = self.freqs_h, self.freqs_w
        if num_patches_h is not None and num_patches_w is not None:
            rows, columns = self._angles(num_patches_h, num_patches_w)
        angles = torch.cat([rows, columns], dim=1)
        if len(angles) != q.shape[-2]:
            raise UserError(f"VisionRoPE2D: {q.shape[-2]} patches, the grid has {len(angles)}")
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)

        def turn(x):
            first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
            return torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1).flatten(-2)

        return turn(q), turn(k)


class RoPEAttentionWrapper(nn.Module):
    """Self-attention of timm's form with rotated queries and keys of the patches; the class token stays as it is.

    attn_module: a block's attention, with qkv, proj, num_heads, head_dim and, if any, q_norm, k_norm, attn_drop and
    proj_drop; its parameters are in the state dict twice, as `attn.qkv` and `qkv`. rope_module: a VisionRoPE2D.
    use_flash_attention, use_mps_optimization: torch chooses the kernel.
    """

    q_norm: Any
    k_norm: Any
    attn_drop: Any
    proj_drop: Any

    def __init__(
        self,
        attn_module: Any,
        rope_module: nn.Module,
        use_flash_attention: bool = False,
        use_mps_optimization: bool = True,
    ):
        super().__init__()
        self.attn, self.rope = attn_module, rope_module
        self.qkv, self.proj = attn_module.qkv, attn_module.proj
        for name in ("q_norm", "k_norm", "attn_drop", "proj_drop"):
            setattr(self, name, getattr(attn_module, name, nn.Identity()))
        self.num_heads, self.head_dim, self.scale = attn_module.num_heads, attn_module.head_dim, attn_module.scale
        self.use_flash, self.use_mps_opt, self.mps_attention = use_flash_attention, use_mps_optimization, None

    def forward(self, x, attn_mask=None, is_causal: bool = False, **kwargs):
        """Return [batch, 1 + patch, width] of x, whose patches are a square grid. kwargs: not used, as timm's blocks
        pass more arguments from version to version."""
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k = self.q_norm(q), self.k_norm(k)
        side = math.isqrt(tokens - 1)
        turned = self.rope(q[:, :, 1:], k[:, :, 1:], side, side)
        q, k = (torch.cat([whole[:, :, :1], part], dim=2) for whole, part in zip((q, k), turned, strict=True))
        dropped = getattr(self.attn_drop, "p", 0.0) if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask, dropped, is_causal, scale=self.scale)
        return self.proj_drop(self.proj(y.transpose(1, 2).reshape(batch, tokens, width)))
