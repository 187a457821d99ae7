"""One idiom of a user's loss or module, and small networks and batches for it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


@dataclasses.dataclass
class Case:
    """A training. modules: a module, or several by name. optimizer: modules -> the optimizer, or a list of
    (name, loss, optimizer) for several. before: called as (number, modules) before each call. observe: () -> numbers
    that Python must hold at the end."""

    modules: Any
    loss: Callable | None
    optimizer: Callable
    data: list
    before: Callable | None = None
    observe: Callable[[], list] | None = None


CASES: dict[str, Callable[[], Case]] = {}


def case(function: Callable[[], Case]) -> Callable[[], Case]:
    """Add a function that makes a Case, anew for every engine."""
    CASES[function.__name__] = function
    return function


def batches(steps: int = 12, rows: int = 8, wide: int = 6, out: int = 1, seed: int = 0) -> list:
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(rows, wide, generator=g), torch.randn(rows, out, generator=g)) for _ in range(steps)]


def labelled(steps: int = 12, rows: int = 8, wide: int = 6, classes: int = 4) -> list:
    g = torch.Generator().manual_seed(0)
    return [
        (torch.randn(rows, wide, generator=g), torch.randint(0, classes, (rows,), generator=g)) for _ in range(steps)
    ]


def net(out: int = 1, wide: int = 6) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(wide, 8), nn.Tanh(), nn.Linear(8, out))


def adamw(module):
    return torch.optim.AdamW(module.parameters(), 1e-2)


def sgd(module):
    return torch.optim.SGD(module.parameters(), 0.05, momentum=0.9)


def mse(module, batch):
    return F.mse_loss(module(batch[0]), batch[1])


class Net(nn.Module):
    def __init__(self, wide: int = 6, out: int = 1):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(wide, 8), nn.Linear(8, out)
        self.beta, self.step = 0.0, 0
        self.setup()

    def setup(self):
        pass

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))
