"""The network as it is deployed: plain torch, nothing of jax or jaxtrain."""

import torch
from torch import nn


class Net(nn.Module):
    """image: float [batch, 1, 8, 8], pixels in 0..1 -> logits [batch, 10]."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.norm = nn.LayerNorm(2 * width * 4 * 4)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(2 * width * 4 * 4, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = nn.functional.gelu(self.conv1(image))
        x = nn.functional.gelu(self.conv2(x)).flatten(1)
        return self.head(self.dropout(self.norm(x)))
