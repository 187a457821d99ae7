"""The original's names, for scripts that change only their imports. Training and inference run in JAX."""

import dataclasses
import pathlib

from jaxtrain.systems.memory_lm.config import get_memory_bank_assignments, get_memory_layer_indices
from jaxtrain.systems.memory_lm.original.datasets import TextDataset, create_dataloader
from jaxtrain.systems.memory_lm.original.inference_routers import create_inference_router
from jaxtrain.systems.memory_lm.original.legacy_config import TrainingConfig
from jaxtrain.systems.memory_lm.original.torch_generation import generate, generate_batch
from jaxtrain.systems.memory_lm.original.torch_models import (
    ChapteredMemoryBank,
    ChapterRouter,
    Config,
    FactorizedMemoryBank,
    LoRALinear,
    MemoryAdapter,
    MemoryBank,
    MemoryConfig,
    MemoryCrossAttention,
    MemoryTransformer,
    ModelConfig,
    QuantizedMemoryBank,
    ReducedDimMemoryBank,
    compute_router_auxiliary_loss,
    extract_memory_weights,
    merge_adapter_weights,
    quantize_memory_for_deployment,
)
from jaxtrain.systems.memory_lm.original.trainer import Trainer

__all__ = [
    "ChapterRouter",
    "ChapteredMemoryBank",
    "Config",
    "FactorizedMemoryBank",
    "LoRALinear",
    "MemoryAdapter",
    "MemoryBank",
    "MemoryConfig",
    "MemoryCrossAttention",
    "MemoryTransformer",
    "ModelConfig",
    "QuantizedMemoryBank",
    "ReducedDimMemoryBank",
    "TextDataset",
    "Trainer",
    "TrainingConfig",
    "compute_router_auxiliary_loss",
    "create_dataloader",
    "create_inference_router",
    "extract_memory_weights",
    "generate",
    "generate_batch",
    "get_memory_bank_assignments",
    "get_memory_layer_indices",
    "load_config",
    "merge_adapter_weights",
    "quantize_memory_for_deployment",
    "save_config",
]


def load_config(path: str | pathlib.Path) -> Config:
    """An original YAML file. Raises FileNotFoundError, and TypeError for an unknown key."""
    from omegaconf import OmegaConf

    path = pathlib.Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such config file")
    values = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    return Config(
        ModelConfig(**values.get("model", {})),
        MemoryConfig(**values.get("memory", {})),
        TrainingConfig(**values.get("training", {})),
    )


def save_config(config: Config, path: str | pathlib.Path) -> None:
    """Write the three sections, fields in their declared order; parents are created."""
    from omegaconf import OmegaConf

    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config))))
