"""The original's factories that have no file of their own: world model, optimizer, masks, config, checkpoint."""

import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from jaxtrain.errors import UserError
from jaxtrain.systems.hjepa.original.datasets import checked
from jaxtrain.systems.hjepa.original.mask_generators import HierarchicalMaskGenerator
from jaxtrain.systems.hjepa.original.torch_checkpoint import CheckpointManager
from jaxtrain.systems.hjepa.torch_twin import LeWorldModel
from torch_bridge.datasets import to_torch


def create_lewm(
    encoder_type: str = "vit_tiny_patch16_224",
    img_size: int = 224,
    embed_dim: int | None = None,
    action_dim: int = 4,
    predictor_depth: int = 6,
    predictor_num_heads: int = 16,
    predictor_mlp_ratio: float = 4.0,
    predictor_dropout: float = 0.1,
    predictor_max_seq_len: int = 256,
    projection_norm: str = "batchnorm",
    use_gradient_checkpointing: bool = False,
    use_layerscale: bool = False,
    layerscale_init: float = 1e-5,
) -> torch.nn.Module:
    """The original's world model as a torch module; weights as a run of `hjepa.world_model` with seed 0 starts.

    embed_dim: the encoder's width if left out. Raises UserError for sizes that do not fit each other.
    """
    from jaxtrain import config_io
    from jaxtrain.runtime.prng import initial_rngs
    from jaxtrain.systems.hjepa import world_model
    from torch_bridge.state_dict import state_dict

    model = {
        "encoder_type": encoder_type,
        "embed_dim": embed_dim,
        "action_dim": action_dim,
        "predictor_depth": predictor_depth,
        "predictor_num_heads": predictor_num_heads,
        "predictor_mlp_ratio": predictor_mlp_ratio,
        "predictor_dropout": predictor_dropout,
        "predictor_max_seq_len": predictor_max_seq_len,
        "projection_norm": projection_norm,
        "gradient_checkpointing": use_gradient_checkpointing,
        "layerscale": {"use_layerscale": use_layerscale, "init_value": layerscale_init},
    }
    values = {"task": "hjepa.world_model", "model": model, "data": {"image_size": img_size}}
    checked = config_io.check(values, "create_lewm")[1]
    module = LeWorldModel(checked)
    start = state_dict(world_model.build_model(checked, initial_rngs(0)))
    module.load_state_dict({key: to_torch(np.asarray(value)) for key, value in start.items()})
    return module


def create_optimizer(model: torch.nn.Module, config: Mapping[str, Any]) -> torch.optim.Optimizer:
    """The torch optimizer of the config's training section: adamw, adam or sgd over all parameters in one group."""
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
    """The original's YAML as nested dicts, as it is; HJEPATrainer checks it."""
    from jaxtrain import config_io

    return config_io.read(pathlib.Path(path))


def create_masking_function(config: Mapping[str, Any]) -> HierarchicalMaskGenerator:
    """The masks of the `masking` section; HJEPATrainer takes their numbers and draws them in the compiled step."""
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


def load_checkpoint(path, model=None, optimizer=None, scheduler=None, scaler=None, device=None) -> dict[str, Any]:
    """A `.pth` of the original (or of CheckpointManager) into torch objects; gives what else it holds."""
    return CheckpointManager(pathlib.Path(path).parent).load_checkpoint(
        path, model, optimizer, scheduler, scaler, device
    )
