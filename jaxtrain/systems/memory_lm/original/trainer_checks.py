"""Check a Trainer's settings."""

import dataclasses
import warnings

from jaxtrain.errors import UserError
from jaxtrain.systems.memory_lm.original.legacy_config import TrainingConfig
from jaxtrain.systems.memory_lm.original.torch_models import Config


def check(training: TrainingConfig) -> None:
    """Raise UserError, a ValueError, for settings out of range or that exclude each other."""
    if training.resume_from_checkpoint and training.init_from_checkpoint:
        raise UserError("training: resume_from_checkpoint and init_from_checkpoint exclude each other; give one")
    positive = ("batch_size", "gradient_accumulation_steps", "max_steps", "num_epochs", "eval_steps", "save_steps")
    for name in (*positive, "logging_steps", "num_gpus", "save_total_limit"):
        value = getattr(training, name)
        if value is not None and value <= 0:
            raise UserError(f"training.{name}: {value}, wanted more than 0")
    for name in ("warmup_steps", "max_grad_norm"):
        if getattr(training, name) < 0:
            raise UserError(f"training.{name}: {getattr(training, name)}, wanted 0 or more")
    if training.early_stopping and training.early_stopping_patience <= 0:
        raise UserError(f"training.early_stopping_patience: {training.early_stopping_patience}, wanted more than 0")


def on_present_devices(config: Config) -> Config:
    """Return the config with training.num_gpus lowered to the available devices, with a warning, as in the original."""
    import jax

    training, present = config.training, jax.local_device_count()
    if training.num_gpus <= present:
        return config
    warnings.warn(f"training.num_gpus: {training.num_gpus}, but this process has {present}", stacklevel=3)
    return dataclasses.replace(config, training=dataclasses.replace(training, num_gpus=present))
