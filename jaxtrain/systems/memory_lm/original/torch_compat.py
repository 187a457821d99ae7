"""Read and write the original's config files: YAML with three sections."""

import dataclasses
import pathlib

from jaxtrain.systems.memory_lm.original.legacy_config import TrainingConfig
from jaxtrain.systems.memory_lm.original.torch_models import Config, MemoryConfig, ModelConfig


def load_config(path: str | pathlib.Path) -> Config:
    """Read an original YAML file. Raises FileNotFoundError, and TypeError for an unknown key."""
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
    """Write the three sections as YAML, fields in their declared order; creates parent folders."""
    from omegaconf import OmegaConf

    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config))))
