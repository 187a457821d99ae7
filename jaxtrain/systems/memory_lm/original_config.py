"""The original's configs (sections model, memory, training) -> this project's settings."""

import math
from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.systems.memory_lm.config import Memory, Model
from jaxtrain.systems.memory_lm.placement import get_memory_layer_indices

PRECISION = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
STRATEGY = {"FULL_SHARD": "fsdp", "SHARD_GRAD_OP": "shard_grad_op", "NO_SHARD": "ddp"}


def convert(config: Mapping[str, Any], compat: str = "correct") -> dict[str, Any]:
    """Nested settings for `jaxtrain.config_io.check`. config: mappings `model`, `memory`, `training`.

    The batch of one optimizer step is batch_size x gradient_accumulation_steps x num_gpus. Learning rates become
    `optim.groups`, decay and clipping stay; `compat` original also keeps padding to max_length and transcripts.
    """
    model, memory, training = (dict(config.get(name) or {}) for name in ("model", "memory", "training"))
    adapter = model.get("base_model_name") is not None
    accumulate, processes = training["gradient_accumulation_steps"], training["num_gpus"]
    steps = (
        {"epochs": training["num_epochs"]} if training["num_epochs"] is not None else {"steps": training["max_steps"]}
    )
    early = training["early_stopping"]
    strategy = training["distributed_strategy"]
    return {
        "task": "memory_lm.adapter" if adapter else "memory_lm.scratch",
        "seed": 42,
        "compat": compat,
        "model": {key: value for key, value in model.items() if key in Model.model_fields},
        "memory": {key: value for key, value in memory.items() if key in Memory.model_fields},
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
        "init_from": training["init_from_checkpoint"],
    }


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
    """Which parameter groups a config trains, in the original's order."""
    section = Memory(**{key: value for key, value in memory.items() if key in Memory.model_fields})
    reads = bool(get_memory_layer_indices(section, model.get("num_layers", 12)))
    present = ["memory", "memory_bank"] if reads else []
    if adapter and section.lora:
        present.append("lora")
    if not adapter or not model.get("freeze_base_model", True):
        present.append("base_model")
    return present


def steps_of(training: Mapping[str, Any], micro_batches: int) -> int:
    """Optimizer steps of the original: max_steps, or num_epochs x ceil(micro-batches / accumulation)."""
    if training["num_epochs"] is None:
        return training["max_steps"]
    return training["num_epochs"] * math.ceil(micro_batches / training["gradient_accumulation_steps"])
