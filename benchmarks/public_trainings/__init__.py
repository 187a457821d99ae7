"""Trainings of the kinds that public repositories hold, small: torch's losses against those of `jaxtrain.compile`.

`python -m benchmarks.public_trainings` runs them. One file per family. Each training has random weights, synthetic data
and no noise of its own: what its original draws in the loss comes with the batch, so that both sides use the same
numbers.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

STEPS = 20
FAMILIES = (
    "language",
    "vision",
    "detection",
    "self_supervised",
    "speech",
    "forecasting",
    "generative",
    "graphs",
    "control",
    "metric_learning",
    "numeric",
    "libraries",
    "drop_ins",
)


@dataclasses.dataclass
class Training:
    """A training as its loop has it: modules by name, a loss and an optimizer for each update, batches in order.

    losses: by update, (*modules, batch) -> scalar. optimizers: by update. batches: a step takes batches[step % len].
    after: called with the modules after each step, as loops do for averages of weights.
    """

    modules: dict[str, nn.Module]
    losses: dict[str, Callable[..., torch.Tensor]]
    optimizers: dict[str, Any]
    batches: Sequence[Any]
    after: Callable[..., None] | None = None


@dataclasses.dataclass(frozen=True)
class Entry:
    """A row of the table. make: gives the Training. script: gives the losses of a side, "torch" or "jax", instead."""

    family: str
    name: str
    detail: str
    make: Callable[[], Training] | None = None
    script: Callable[[str], list[float]] | None = None


ENTRIES: list[Entry] = []


def training(name: str, detail: str) -> Callable:
    """Register a function that makes a Training. detail: what of it is hard to compile, a few words."""

    def register(make: Callable[[], Training]) -> Callable[[], Training]:
        ENTRIES.append(Entry(make.__module__.rsplit(".", 1)[-1], name, detail, make=make))
        return make

    return register


def script(name: str, detail: str) -> Callable:
    """Register a function of the side ("torch" or "jax") that trains by itself and returns the losses."""

    def register(run: Callable[[str], list[float]]) -> Callable[[str], list[float]]:
        ENTRIES.append(Entry(run.__module__.rsplit(".", 1)[-1], name, detail, script=run))
        return run

    return register


def one(module: nn.Module, loss: Callable, batches: Sequence[Any], optimizer: Any = None) -> Training:
    """Return the training of one module with one optimizer, by default AdamW at 1e-3."""
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(trained, lr=1e-3)
    return Training({"module": module}, {"loss": loss}, {"loss": optimizer}, batches)


def adam(*modules: nn.Module, lr: float = 1e-3) -> torch.optim.Adam:
    return torch.optim.Adam([p for module in modules for p in module.parameters()], lr=lr)
