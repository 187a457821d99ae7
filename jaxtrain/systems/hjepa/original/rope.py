"""The original's rotary position embedding of patches on a grid, as a torch module."""

import torch
from torch import nn

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
