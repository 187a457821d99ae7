"""Small models of many libraries, each with data and a loss, for `python -m benchmarks.certificates`.

`LIBRARIES`: module of this package -> the distribution whose models it builds.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from jaxtrain.systems.torch_module.torch_examples import Named

SAMPLES = 16  # two batches

LIBRARIES = {
    "policies": "stable-baselines3",
    "tables": "rtdl-revisiting-models",
    "series": "gluonts",
    "graphs": "torch-geometric",
    "vit_pytorch_models": "vit-pytorch",
    "tabnet": "pytorch-tabnet",
    "x_transformers_models": "x-transformers",
    "kornia_models": "kornia",
    "timm_models": "timm",
    "transformers_models": "transformers",
    "segmentation": "segmentation-models-pytorch",
    "medical": "monai",
    "diffusers_models": "diffusers",
    "clip": "open-clip-torch",
    "sound": "snac",
    "peft_models": "peft",
}


@dataclasses.dataclass(frozen=True)
class Certified:
    """build: -> (module, training Dataset, loss as Trainer takes it)."""

    name: str
    build: Callable[[], tuple[torch.nn.Module, Any, Any]]


def rows(**columns: torch.Tensor) -> Named:
    """A Dataset of dicts."""
    return Named(**columns)


def images(size: int = 32, channels: int = 3) -> torch.Tensor:
    return torch.randn(SAMPLES, channels, size, size)


def tokens(length: int, vocabulary: int = 64) -> torch.Tensor:
    return torch.randint(1, vocabulary, (SAMPLES, length))


def classes(count: int = 5) -> torch.Tensor:
    return torch.randint(0, count, (SAMPLES,))
