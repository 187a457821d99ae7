"""A small torch module and its data, which `jaxtrain.tune` imports by name."""

import torch
from torch import nn


def net(dropout: float) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 2))


def data(split: str):
    generator = torch.Generator().manual_seed(len(split))
    x = torch.randn(32, 4, generator=generator)
    return None if split == "test" else torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
