"""Convert the original's configs (sections model, memory, training) to this project's settings."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.systems.memory_lm.config import Memory, Model, get_memory_layer_indices
from jaxtrain.task import LegacyConfig

PRECISION = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
STRATEGY = {"FULL_SHARD": "fsdp", "SHARD_GRAD_OP": "shard_grad_op", "NO_SHARD": "ddp"}


OWN = {  # keys of this project that the original's sections do not have
    "model": ("base_config", "base_dtype", "scan_layers"),
    "memory": ("mask_aware_pooling", "chapter_softmax", "freeze_memory_bank", "freeze_router"),
}

LAST = {  # keys that the original declares at the end of a section
    "model": ("tie_embeddings",),
    "memory": ("use_memory_adapter", "use_both_memory_and_lora"),
}


def original_order(name: str, keys: Iterable[str]) -> list[str]:
    """Return those of a section's keys that the original has, in the order in which it declares them."""
    known = [key for key in keys if key not in OWN[name]]
    return [key for key in known if key not in LAST[name]] + [key for key in LAST[name] if key in known]


@dataclasses.dataclass
class TrainingConfig:
    """The original's config section `training`, with its defaults."""

    memory_lr: float = 1e-4
    memory_bank_lr: float | None = None
    lora_lr: float = 1e-4
    base_model_lr: float = 1e-5
    training_mode: str = "instruction_finetuning"
    dataset_name: str = "HuggingFaceH4/ultrachat_200k"
    dataset_subset: str | None = None
    dataset_split: str = "train"
    eval_split: str = "test"
    text_field: str | list[str] = "messages"
    max_length: int = 8192
    distributed_strategy: str = "ddp"
    num_gpus: int = 1
    fsdp_sharding_strategy: str = "FULL_SHARD"
    batch_size: int = 4
    gradient_accumulation_steps: int = 4
    num_epochs: int | None = None
    max_steps: int = 10000
    warmup_steps: int = 100
    warmup_ratio: float | None = None
    optimizer: str = "adamw"
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    scheduler: str = "cosine"
    min_lr_ratio: float = 0.1
    decay_start_step: int | None = None
    decay_start_ratio: float | None = None
    wsd_stable_steps: int | None = None
    wsd_stable_ratio: float = 0.0
    mixed_precision: str = "bf16"
    save_precision: str | None = None
    gradient_checkpointing: bool = True
    save_steps: int = 500
    eval_steps: int = 500
    save_total_limit: int | None = 3
    save_best_model: bool = True
    early_stopping: bool = False
    early_stopping_patience: int = 5
    early_stopping_threshold: float = 0.0
    logging_steps: int = 10
    log_to_wandb: bool = False
    wandb_project: str = "memory-transformer"
    wandb_run_name: str | None = None
    output_dir: str = "./outputs"
    resume_from_checkpoint: str | None = None
    init_from_checkpoint: str | None = None


REPLACED = {
    "save_best_model": "exports/best.pt is always written",
}
TRAINING = {field.name for field in dataclasses.fields(TrainingConfig)} - set(REPLACED)


def convert(config: Mapping[str, Any], compat: str = "correct") -> dict[str, Any]:
    """Return nested settings for `jaxtrain.config_io.check`. config: mappings `model`, `memory`, `training`.

    The batch of one optimizer step is batch_size x gradient_accumulation_steps x num_gpus. Learning rates become
    `optim.groups`; weight decay and clipping are kept. `compat: original` also keeps the original's padding to
    max_length and its chat transcripts. Missing values take the original's defaults.
    """
    model = _known(config.get("model"), Model.model_fields)
    memory = _known(config.get("memory"), Memory.model_fields)
    training = dataclasses.asdict(TrainingConfig(**_known(config.get("training"), TRAINING)))
    adapter = model.get("base_model_name") is not None
    accumulate, processes = training["gradient_accumulation_steps"], training["num_gpus"]
    steps = (
        {"epochs": training["num_epochs"]} if training["num_epochs"] is not None else {"steps": training["max_steps"]}
    )
    _check_choices(training)
    early = training["early_stopping"]
    strategy = training["distributed_strategy"]
    return {
        "task": "memory_lm.adapter" if adapter else "memory_lm.scratch",
        "seed": 42,
        "compat": compat,
        # MemoryAdapter writes its base model's number of layers into the config, so it is no setting here.
        "model": {key: value for key, value in model.items() if not (adapter and key == "num_layers")},
        "memory": memory,
        "data": {
            "dataset_name": training["dataset_name"],
            "dataset_subset": training["dataset_subset"],
            "dataset_split": training["dataset_split"],
            "eval_split": training["eval_split"],
            "text_field": training["text_field"],
            "training_mode": training["training_mode"],
            "max_length": training["max_length"],
            "batch_size": training["batch_size"] * accumulate * processes,
            "eval_batch_size": training["batch_size"] * processes,
            "packing": False,
            "drop_last": False,
        },
        "optim": _optim(model, memory, training, adapter),
        "train": {
            **steps,
            "accumulate_steps": accumulate,
            "accumulate_mean": "micro" if compat == "original" else "weighted",
            "log_every_steps": training["logging_steps"],
            "remat": "full" if training["gradient_checkpointing"] else "none",
            "nan_policy": "ignore" if compat == "original" else "stop",
        },
        "evaluation": {
            "every_epochs": None,
            "every_steps": training["eval_steps"],
            "patience": training["early_stopping_patience"] if early else None,
            "min_delta": max(0.0, training["early_stopping_threshold"]),
        },
        "checkpoint": {
            "every_epochs": None,
            "every_steps": training["save_steps"],
            "keep_last": training["save_total_limit"] or 1_000_000,
            "save_precision": training["save_precision"],
        },
        "precision": {"policy": PRECISION[training["mixed_precision"]]},
        "shard": {
            "strategy": STRATEGY[training["fsdp_sharding_strategy"]] if strategy == "fsdp" else "ddp",
            "devices": processes,
        },
        "tracking": {"wandb": training["log_to_wandb"], "wandb_project": training["wandb_project"]},
        "run": {"dir": training["output_dir"], "name": training["wandb_run_name"]},
        "init_from": training["resume_from_checkpoint"] or training["init_from_checkpoint"],
        "init_optimizer": training["init_from_checkpoint"] is None,
    }


def _check_choices(training: Mapping[str, Any]) -> None:
    choices = {"mixed_precision": PRECISION}
    if training["distributed_strategy"] == "fsdp":
        choices["fsdp_sharding_strategy"] = STRATEGY
    for name, known in choices.items():
        if training[name] not in known:
            raise UserError(f"training.{name}: {training[name]!r}, wanted one of {', '.join(known)}")


def _known(section: Mapping[str, Any] | None, names) -> dict[str, Any]:
    return {key: section[key] for key in section or {} if key in names}


def _optim(model, memory, training, adapter: bool) -> dict[str, Any]:
    bank = training["memory_bank_lr"]
    rates = {
        "memory": training["memory_lr"],
        "memory_bank": training["memory_lr"] if bank is None else bank,
        "lora": training["lora_lr"],
        "base_model": training["base_model_lr"],
    }
    present = groups_present(model, memory, adapter)
    if not present:
        raise UserError("nothing to train: the base model is frozen, without memory and without LoRA")
    name = training["optimizer"] if training["optimizer"] in ("adamw", "adam") else "sgd"
    keys = ("scheduler", "warmup_steps", "warmup_ratio", "min_lr_ratio", "decay_start_step", "decay_start_ratio")
    return {
        "name": name,
        "lr": rates[present[0]],
        "groups": {group: {"lr": rates[group]} for group in present},
        "weight_decay": 0.0 if name == "adam" else training["weight_decay"],
        "beta1": training["adam_beta1"],
        "beta2": training["adam_beta2"],
        "eps": training["adam_epsilon"],
        "momentum": 0.9,
        "clip_norm": training["max_grad_norm"] or None,
        "original_schedule": {key: training[key] for key in (*keys, "wsd_stable_steps", "wsd_stable_ratio")},
    }


def groups_present(model: Mapping[str, Any], memory: Mapping[str, Any], adapter: bool) -> list[str]:
    """Return the parameter groups that a config trains, in the original's order."""
    section = Memory(**{key: value for key, value in memory.items() if key in Memory.model_fields})
    reads = bool(get_memory_layer_indices(section, model.get("num_layers", 12)))
    present = ["memory", "memory_bank"] if reads else []
    if adapter and section.lora:
        present.append("lora")
    if not adapter or not model.get("freeze_base_model", True):
        present.append("base_model")
    return present


ORIGINAL = LegacyConfig(
    name="memory (memory_transformer)",
    keys=frozenset(
        {f"model.{name}" for name in Model.model_fields}
        | {f"memory.{name}" for name in Memory.model_fields}
        | {f"training.{name}" for name in (*TRAINING, *REPLACED)}
    ),
    convert=convert,
    replaced={f"training.{name}": why for name, why in REPLACED.items()},
)
