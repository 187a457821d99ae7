"""Modules with a fault that one sample brings out, for `task: torch_module`."""

import torch
from torch import nn
from torch.utils.data import Dataset

BAD = 7  # the sample


class Log(nn.Module):
    def forward(self, x):
        return torch.log(x)


class LogNet(nn.Module):
    """x: float [batch, 4], positive but for one sample."""

    def __init__(self):
        super().__init__()
        self.log, self.head = Log(), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.log(x))[:, 0]


class RootNet(nn.Module):
    """The root of 0 has an infinite slope; the values are finite."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(torch.sqrt(self.stem(x) ** 2))[:, 0]


class Rows(Dataset):
    def __init__(self, split):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.rand(32, 4, generator=generator) + 0.5
        self.x[BAD] = 0.0
        self.y = self.x.sum(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.y[index]}
