"""Layers of the original under its names."""

import torch

from jaxtrain.systems.hjepa import torch_twin, torch_vit


class DropPath(torch_vit.DropPath):
    """In training, zero the input for random whole samples and scale it for the others by 1 / (1 - drop_prob)."""

    def __init__(self, drop_prob: float = 0.0):
        super().__init__(drop_prob)


class LayerScale(torch_vit.LayerScale):
    """Multiply by the parameter `gamma` [dim]."""

    def __init__(self, dim: int, init_values: float = 1e-5):
        super().__init__(dim, init_values)


class BatchNorm1dForTokens(torch_twin.TokenBatchNorm):
    """BatchNorm1d over all tokens of a batch: [batch, token, dim] or [row, dim]."""

    def __init__(self, dim: int, eps: float = 1e-5, momentum: float = 0.1):
        super().__init__(dim)
        self.bn = torch.nn.BatchNorm1d(dim, eps=eps, momentum=momentum)
