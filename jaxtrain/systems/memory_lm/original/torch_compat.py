"""The original's config files, YAML with three sections, and what follows from them."""

import dataclasses
import pathlib
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.systems.memory_lm import config as sections
from jaxtrain.systems.memory_lm.data import SPECIAL
from jaxtrain.systems.memory_lm.original.legacy_config import TrainingConfig
from jaxtrain.systems.memory_lm.original.torch_models import Config, MemoryConfig, ModelConfig


def load_config(config_path: str | pathlib.Path) -> Config:
    """Read an original YAML file. Raises FileNotFoundError, and TypeError for an unknown key."""
    from omegaconf import OmegaConf

    path = pathlib.Path(config_path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such config file")
    values = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    return Config(
        ModelConfig(**values.get("model", {})),
        MemoryConfig(**values.get("memory", {})),
        TrainingConfig(**values.get("training", {})),
    )


def save_config(config: Config, config_path: str | pathlib.Path) -> None:
    """Write the three sections as YAML, fields in their declared order; creates parent folders."""
    from omegaconf import OmegaConf

    path = pathlib.Path(config_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config))))


def get_memory_layer_indices(config: Config) -> list[int]:
    """Return the layers of a config that read memory, ascending. Raises ValueError for a placement without meaning."""
    return sections.get_memory_layer_indices(config.memory, config.model.num_layers)


def get_memory_bank_assignments(config: Config) -> dict[int, int]:
    """Return the number of each memory layer's bank. Raises ValueError for an unknown kind of sharing."""
    return sections.get_memory_bank_assignments(config.memory, get_memory_layer_indices(config))


def configure_tokenizer_special_ids(tokenizer: Any, model_config: Any) -> Any:
    """Give a tokenizer the special ids of a `model` section, and its end token as padding if it has none; return it.

    Raises ValueError for an id that the tokenizer lacks.
    """
    for name in SPECIAL:
        number = getattr(model_config, name)
        if number is None:
            continue
        if not 0 <= number < len(tokenizer):
            raise UserError(f"model.{name}: {number}, wanted one of the {len(tokenizer)} entries of the tokenizer")
        setattr(tokenizer, name.removesuffix("_id"), tokenizer.convert_ids_to_tokens(number))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
