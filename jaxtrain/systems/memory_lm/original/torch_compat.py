"""The original's names, for scripts that change only their imports. Training and inference run in JAX."""

import copy
import dataclasses
import pathlib
from typing import Any

import torch

from jaxtrain.errors import UserError
from jaxtrain.systems.memory_lm import data
from jaxtrain.systems.memory_lm.config import Data, get_memory_bank_assignments, get_memory_layer_indices
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
    checked,
    compute_router_auxiliary_loss,
    extract_memory_weights,
    merge_adapter_weights,
    quantize_memory_for_deployment,
)
from jaxtrain.systems.memory_lm.text_dataset import Encoder
from jaxtrain.systems.memory_lm.tokenizers import PretrainedTokenizer
from torch_bridge.datasets import to_numpy

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


# --- data -------------------------------------------------------------------------------------------------------------


class TextDataset(torch.utils.data.Dataset):
    """Rows of a dataset as int64 tensors input_ids, attention_mask and labels of max_length, by the original's rules.

    dataset_name: a local file or folder, or a hub id. tokenizer: a transformers tokenizer.
    """

    def __init__(
        self,
        dataset_name: str,
        tokenizer: Any,
        max_length: int = 8192,
        split: str = "train",
        subset: str | None = None,
        text_field: str | list[str] = "text",
        training_mode: str = "pretraining",
        num_samples: int | None = None,
    ):
        section = Data(dataset_name=dataset_name, dataset_subset=subset, text_field=text_field)
        self.rows = list(data.read_rows(section, split, num_samples))
        inner = PretrainedTokenizer(tokenizer, str(tokenizer.name_or_path))
        self.encoder = Encoder(inner, max_length, training_mode, text_field, original=True)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {key: torch.from_numpy(value).long() for key, value in self.encoder.padded(self.rows[index]).items()}


def create_dataloader(
    dataset_name: str,
    tokenizer: Any,
    batch_size: int,
    max_length: int,
    split: str = "train",
    subset: str | None = None,
    text_field: str | list[str] = "text",
    training_mode: str = "pretraining",
    num_workers: int = 4,
    shuffle: bool = True,
    num_samples: int | None = None,
    drop_last: bool = True,
) -> torch.utils.data.DataLoader:
    """A torch DataLoader over TextDataset."""
    dataset = TextDataset(dataset_name, tokenizer, max_length, split, subset, text_field, training_mode, num_samples)
    return torch.utils.data.DataLoader(
        dataset, batch_size, shuffle=shuffle, num_workers=num_workers, drop_last=drop_last
    )


# --- training ---------------------------------------------------------------------------------------------------------


class Trainer:
    """The original's trainer, with this project's engine inside. Results lie under training.output_dir.

    config: of load_config. model: a MemoryTransformer or MemoryAdapter of this module to start from and to leave the
    trained weights in, or None.
    """

    def __init__(self, config: Config, model: torch.nn.Module | None = None, **changes):
        from jaxtrain.task import find_task
        from jaxtrain.train.trainer import Trainer as Engine

        training = config.training
        if training.resume_from_checkpoint and training.init_from_checkpoint:
            raise UserError("training: resume_from_checkpoint and init_from_checkpoint exclude each other; give one")
        resume = pathlib.Path(training.resume_from_checkpoint or "")
        if training.resume_from_checkpoint and (resume / "trainer_state.json").is_file():
            raise UserError(
                f"resume_from_checkpoint: {resume} is a checkpoint of the original, wanted a run folder of jaxtrain. "
                f"Start from its weights with init_from_checkpoint={resume / 'model.pt'}; its optimizer.bin is not read"
            )
        self.config, self.model = config, model
        settings = checked(config, **changes)
        self.engine = Engine(config=settings, task=find_task(settings.task))
        if model is not None:
            self.engine.load_state_dict(to_numpy(model.state_dict()))

    def train(self) -> dict[str, Any]:
        """Train to the end; best_val_loss, train_history and val_history."""
        history = self.engine.train(resume=self.config.training.resume_from_checkpoint or "auto")
        if self.model is not None:
            self.model.load_state_dict(self.engine.state_dict())
        return history

    def evaluate(self) -> dict[str, float]:
        return {"eval_loss": self.engine.evaluate()["loss"]}

    @staticmethod
    def find_lr(config: Config, min_lr: float = 1e-7, max_lr: float = 1.0, num_steps: int = 100) -> list[dict]:
        """[{"lr": ..., "loss": ...}]; the config and its weights stay as they are."""
        from jaxtrain.train.search.lr_range import range_test

        changed = copy.deepcopy(config)
        changed.training.max_steps, changed.training.num_epochs = num_steps, None
        changed.training.gradient_accumulation_steps, changed.training.log_to_wandb = 1, False
        found = range_test(Trainer(changed).engine.program, min_lr, max_lr, num_steps, clip=False)
        return [{"lr": lr, "loss": loss} for lr, loss in zip(found.lr, found.loss, strict=True)]
