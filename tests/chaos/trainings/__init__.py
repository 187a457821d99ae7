# ruff: noqa: E501  # tables of settings read better in whole lines
"""Small trainings as public torch code writes them: random weights, synthetic data, twenty batches.

Each is a function that makes a `Training` anew; `TRAININGS` lists them by name. `tests.chaos.public_trainings` runs them
in torch and under `jaxtrain.compile` and compares the losses.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

STEPS = 20


@dataclasses.dataclass
class Update:
    """One optimizer and the loss that it minimizes: loss(*modules, batch) -> scalar, or (scalar, values to log)."""

    loss: Callable
    optimizer: torch.optim.Optimizer
    scheduler: Any = None


@dataclasses.dataclass
class Training:
    """What a script trains. after: called with the modules after every step, as a loop does for an averaged teacher."""

    modules: dict[str, torch.nn.Module]
    updates: dict[str, Update]
    batches: list
    after: Callable[[dict[str, torch.nn.Module]], None] | None = None


TRAININGS: dict[str, Callable[[], Training]] = {}
FOLLOWS: dict[str, str] = {}  # what each one follows
FIELDS: dict[str, str] = {}


def training(follows: str) -> Callable:
    """Register a training; `follows` says whose public code has its form."""

    def register(make: Callable[[], Training]) -> Callable[[], Training]:
        TRAININGS[make.__name__] = make
        FOLLOWS[make.__name__] = follows
        FIELDS[make.__name__] = make.__module__.rpartition(".")[2]
        return make

    return register


def one(module: torch.nn.Module, loss: Callable, batches: list, rate: float = 1e-3, **more: Any) -> Training:
    """Return a training of one module by AdamW."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return Training({"model": module}, {"loss": Update(loss, torch.optim.AdamW(trained, rate))}, batches, **more)


def draws(seed: int = 0) -> torch.Generator:
    """Return a generator of a training's own."""
    return torch.Generator().manual_seed(seed)


def repeated(make: Callable[[torch.Generator], Any]) -> list:
    """Return `STEPS` batches."""
    generator = draws()
    return [make(generator) for _ in range(STEPS)]
