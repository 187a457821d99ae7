"""The original's names, for scripts that change only their imports. Training and inference run in JAX."""

import copy
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.nn.lora import LoRALinear, named_layers
from jaxtrain.systems.memory_lm import data, generation, losses
from jaxtrain.systems.memory_lm import model as scratch
from jaxtrain.systems.memory_lm.attention import MemoryCrossAttention
from jaxtrain.systems.memory_lm.banks import (
    ChapteredMemoryBank,
    FactorizedMemoryBank,
    MemoryBank,
    QuantizedMemoryBank,
    ReducedDimMemoryBank,
)
from jaxtrain.systems.memory_lm.banks import quantize_memory_for_deployment as _quantize
from jaxtrain.systems.memory_lm.config import Data, get_memory_bank_assignments, get_memory_layer_indices
from jaxtrain.systems.memory_lm.config import Memory as _Memory
from jaxtrain.systems.memory_lm.config import Model as _Model
from jaxtrain.systems.memory_lm.decoding import Sampling
from jaxtrain.systems.memory_lm.original import legacy_config
from jaxtrain.systems.memory_lm.original.inference_routers import create_inference_router
from jaxtrain.systems.memory_lm.original.legacy_config import TrainingConfig
from jaxtrain.systems.memory_lm.router import ChapterRouter, compute_router_auxiliary_loss, router_losses
from jaxtrain.systems.memory_lm.text_dataset import Encoder
from jaxtrain.systems.memory_lm.tokenizers import PretrainedTokenizer
from torch_bridge.datasets import to_torch
from torch_bridge.state_dict import load_state_dict, state_dict

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


def _dataclass(name: str, section: type, leave_out: Sequence[str] = ()) -> type:
    """A mutable dataclass with a section's fields and defaults, as the original has it."""
    fields = []
    for key, field in section.model_fields.items():
        if key not in leave_out:
            make = field.get_default
            fields.append((key, Any, dataclasses.field(default_factory=lambda make=make: copy.deepcopy(make()))))
    return dataclasses.make_dataclass(name, fields)


ModelConfig = _dataclass("ModelConfig", _Model, legacy_config.OWN["model"])
MemoryConfig = _dataclass("MemoryConfig", _Memory, legacy_config.OWN["memory"])


@dataclasses.dataclass
class Config:
    model: Any = dataclasses.field(default_factory=ModelConfig)
    memory: Any = dataclasses.field(default_factory=MemoryConfig)
    training: Any = dataclasses.field(default_factory=TrainingConfig)


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


class _Facade:
    """Implement what the original's two model classes share: torch tensors in, a dict of torch tensors out."""

    module: nnx.Module

    def __init__(self, config: Config):
        self.config = config
        self.training = True
        self.memory_section = _Memory(**dataclasses.asdict(config.memory))

    def __call__(self, input_ids, attention_mask=None, labels=None, position_ids=None, **ignored) -> dict[str, Any]:
        """logits; loss (cross-entropy, plus the router's terms in train mode) where labels are given; router_losses, a
        dict per memory layer in train mode. For cached decoding use `generate`."""
        from jaxtrain import nn

        ids, mask, places = (_array(value) for value in (input_ids, attention_mask, position_ids))
        rngs = nn.Rngs(jax.random.key(0)) if self.training else None
        output = self.module(ids, mask, places, rngs=rngs)
        terms = [router_losses(one) for one in output.routing.values()] if self.training else []
        loss = None
        if labels is not None:
            shifted = _array(labels)[:, 1:]
            nll = losses.token_losses(output.hidden[:, :-1], self.module.head_weight, shifted)
            count = (shifted != losses.IGNORE).sum()
            loss = jnp.where(count > 0, nll.sum() / jnp.maximum(count, 1), jnp.nan)
            loss = _tensor(loss + (losses.aggregate_router_losses(terms, self.memory_section) if terms else 0.0))
        return {
            "logits": _tensor(self.module.head(output.hidden)),
            "loss": loss,
            "past_key_values": None,
            "router_losses": [{name: _tensor(value) for name, value in term.items()} for term in terms],
        }

    forward = __call__

    def train(self, mode: bool = True):
        self.training = mode
        return self

    def eval(self):
        return self.train(False)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {key: to_torch(value) for key, value in state_dict(self.module).items()}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True):
        return load_state_dict(self.module, {key: np.asarray(value) for key, value in state.items()}, strict)


class MemoryTransformer(_Facade):
    """The model from scratch. Writes the effective length into the config, as the original does."""

    def __init__(self, config: Config):
        super().__init__(config)
        section = _Model(**dataclasses.asdict(config.model))
        config.model.max_seq_len = config.model.max_position_embeddings = section.length
        self.module = scratch.MemoryTransformer(section, self.memory_section, rngs=nnx.Rngs(42))


class MemoryAdapter(_Facade):
    """A pretrained model with memory; its weights are read from `model.base_model_name`."""

    def __init__(self, config: Config):
        super().__init__(config)
        from jaxtrain.systems.memory_lm import adapter

        settings = _settings(config)
        self.module = adapter.build_model(settings, nnx.Rngs(42))
        load_state_dict(self.module, adapter.initial_weights(settings) or {}, strict=False)
        config.model.num_layers = self.module.config.num_layers


def _settings(config: Config, **changes):
    """The checked settings of this project."""
    from jaxtrain import config_io

    return config_io.check(legacy_config.convert(dataclasses.asdict(config)) | changes, "the original's config")[1]


def _array(value):
    return None if value is None else jnp.asarray(np.asarray(value).astype(np.int32))


def _tensor(value) -> torch.Tensor:
    return to_torch(np.asarray(value, np.float32))


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

    def __init__(self, config: Config, model: _Facade | None = None, **changes):
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
        settings = _settings(config, **changes)
        self.engine = Engine(config=settings, task=find_task(settings.task))
        if model is not None:
            self.engine.load_state_dict(state_dict(model.module))

    def train(self) -> dict[str, Any]:
        """Train to the end; best_val_loss, train_history and val_history."""
        history = self.engine.train(resume=self.config.training.resume_from_checkpoint or "auto")
        if self.model is not None:
            load_state_dict(self.model.module, self.engine.state_dict())
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


# --- inference --------------------------------------------------------------------------------------------------------


def generate(
    model: _Facade,
    tokenizer: Any,
    prompt: str,
    max_new_tokens: int = 256,
    temperature: float = 0.7,
    top_p: float = 0.9,
    top_k: int = 50,
    do_sample: bool = True,
    device: str = "cpu",
) -> str:
    """The prompt and its continuation. device: not used, JAX decides."""
    return generate_batch(model, tokenizer, [prompt], max_new_tokens, temperature, top_p, top_k, do_sample, device)[0]


def generate_batch(
    model: _Facade,
    tokenizer: Any,
    prompts: Sequence[str],
    max_new_tokens: int = 256,
    temperature: float = 0.7,
    top_p: float = 0.9,
    top_k: int = 50,
    do_sample: bool = True,
    device: str = "cpu",
) -> list[str]:
    """Prompts and continuations, in one batch."""
    sampling = Sampling(temperature, top_p, top_k, do_sample)
    inner = PretrainedTokenizer(tokenizer, "given")
    return generation.generate_batch(model.module, inner, prompts, max_new_tokens, sampling=sampling)


def merge_adapter_weights(model: _Facade) -> dict[str, torch.Tensor]:
    """Add every LoRA to its weight, in place, and give the state dict without the LoRA's own matrices (the original
    keeps them, so that loading its result applies the update twice)."""
    for *_, layer in named_layers(model.module, LoRALinear):
        layer.merge()
    return {key: value for key, value in model.state_dict().items() if not key.endswith((".lora_A", ".lora_B"))}


def extract_memory_weights(model: _Facade) -> dict[str, torch.Tensor]:
    """The weights that belong to the memory, norms included (the original misses these)."""
    from jaxtrain.systems.memory_lm.param_groups import param_group

    return {k: v for k, v in model.state_dict().items() if param_group(k, None) in ("memory", "memory_bank")}


def quantize_memory_for_deployment(model: _Facade, bits: int = 8) -> _Facade:
    """Replace every bank by its quantised form, in place."""
    _quantize(model.module, bits)
    return model
