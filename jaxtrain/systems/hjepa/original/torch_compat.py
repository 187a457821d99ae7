"""The original's factories that have no file of their own: optimizer, masks, config, checkpoint."""

import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import torch

from jaxtrain.errors import UserError
from jaxtrain.systems.hjepa.original.datasets import checked
from jaxtrain.systems.hjepa.original.mask_generators import HierarchicalMaskGenerator
from jaxtrain.systems.hjepa.original.torch_checkpoint import CheckpointManager


def create_optimizer(model: torch.nn.Module, config: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Return the training section's torch optimizer: adamw, adam or sgd over all parameters in one group."""
    training = config.get("training", config)
    name = str(training.get("optimizer", "adamw")).lower()
    lr, decay = training.get("lr", training.get("learning_rate", 1e-4)), training.get("weight_decay", 0.0)
    kinds = {
        "adamw": functools.partial(torch.optim.AdamW, betas=tuple(training.get("betas") or (0.9, 0.95)), eps=1e-8),
        "adam": torch.optim.Adam,
        "sgd": functools.partial(torch.optim.SGD, momentum=training.get("momentum", 0.9)),
    }
    if name not in kinds:
        raise UserError(f"training.optimizer: {name!r} is unknown; known: {', '.join(kinds)}")
    return kinds[name](model.parameters(), lr=lr, weight_decay=decay)


def load_config(path: str | pathlib.Path) -> dict[str, Any]:
    """Read the original's YAML as nested dicts, unchecked; HJEPATrainer checks it. Raises FileNotFoundError."""
    from jaxtrain import config_io

    if not config_io.locate(path).is_file():
        raise FileNotFoundError(f"{path}: no such config file")
    return config_io.read(pathlib.Path(path))


def create_masking_function(config: Mapping[str, Any]) -> HierarchicalMaskGenerator:
    """Return the mask generator of the `masking` section."""
    from jaxtrain.nn.vit import overrides, vit_size

    settings = checked(config)
    return HierarchicalMaskGenerator(
        input_size=settings.data.image_size,
        patch_size=vit_size(settings.model.encoder_type, **overrides(settings.model.vit)).patch_size,
        num_hierarchies=settings.model.num_hierarchies,
        num_target_masks=settings.masking.num_masks,
        base_scale=settings.masking.mask_scale,
        aspect_ratio_range=settings.masking.aspect_ratio,
    )


def load_checkpoint(
    filepath, model=None, optimizer=None, device="cuda", *, scheduler=None, scaler=None, strict: bool = True
) -> dict[str, Any]:
    """Load a `.pth` of the original (or of CheckpointManager) into torch objects; return its other entries.

    Raises FileNotFoundError if the file is missing.
    """
    path = pathlib.Path(filepath)
    if not path.is_file():  # before the manager makes a folder for it
        raise FileNotFoundError(f"{path}: no such checkpoint")
    return CheckpointManager(path.parent).load_checkpoint(
        path, model, optimizer, scheduler, scaler, device, strict=strict
    )
