"""The original's names, for scripts that change only their imports. Training itself runs in JAX."""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from jaxtrain.errors import UserError
from jaxtrain.systems.hjepa.original import legacy_config
from jaxtrain.systems.hjepa.original.mask_generators import HierarchicalMaskGenerator
from jaxtrain.systems.hjepa.original.metrics_logger import MetricsLogger
from jaxtrain.systems.hjepa.original.schedules import (
    CosineScheduler,
    EMAScheduler,
    HierarchicalScheduler,
    LinearScheduler,
    create_ema_scheduler,
    create_lr_scheduler,
)
from jaxtrain.systems.hjepa.original.torch_checkpoint import CheckpointManager, read_checkpoint
from jaxtrain.systems.hjepa.torch_twin import LeWorldModel
from torch_bridge.datasets import to_torch

__all__ = [
    "CheckpointManager",
    "CosineScheduler",
    "EMAScheduler",
    "HJEPATrainer",
    "HierarchicalScheduler",
    "LinearScheduler",
    "MetricsLogger",
    "create_ema_scheduler",
    "create_lewm",
    "create_lr_scheduler",
    "create_masking_function",
    "create_optimizer",
    "create_train_loader",
    "create_val_loader",
    "load_checkpoint",
    "load_config",
]


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


def _checked(config: Mapping[str, Any]):
    from jaxtrain import config_io

    return config_io.check(legacy_config.convert(config), "the original's config")[1]


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


def create_train_loader(config: Mapping[str, Any]) -> torch.utils.data.DataLoader:
    """The training split of the config's `data` section."""
    return _loader(config, "train", shuffle=True, drop_last=True)


def create_val_loader(config: Mapping[str, Any]) -> torch.utils.data.DataLoader:
    return _loader(config, "validation")


def _loader(config: Mapping[str, Any], split: str, **options) -> torch.utils.data.DataLoader:
    from jaxtrain.systems.hjepa.data import build_data

    size = (config.get("data") or {}).get("batch_size", 128)
    return torch.utils.data.DataLoader(build_data(_checked(config), split), batch_size=size, **options)


def create_masking_function(config: Mapping[str, Any]) -> HierarchicalMaskGenerator:
    """The masks of the `masking` section; HJEPATrainer takes their numbers and draws them in the compiled step."""
    from jaxtrain.nn.vit import overrides, vit_size

    checked = _checked(config)
    return HierarchicalMaskGenerator(
        input_size=checked.data.image_size,
        patch_size=vit_size(checked.model.encoder_type, **overrides(checked.model.vit)).patch_size,
        num_hierarchies=checked.model.num_hierarchies,
        num_target_masks=checked.masking.num_masks,
        base_scale=checked.masking.mask_scale,
        aspect_ratio_range=checked.masking.aspect_ratio,
    )


def load_checkpoint(path, model=None, optimizer=None, scheduler=None, scaler=None, device=None) -> dict[str, Any]:
    """A `.pth` of the original (or of CheckpointManager) into torch objects; gives what else it holds."""
    return CheckpointManager(pathlib.Path(path).parent).load_checkpoint(
        path, model, optimizer, scheduler, scaler, device
    )


class HJEPATrainer:
    """The original's trainer, with this project's engine inside.

    model: a torch module with the original's keys (create_model), trained in place. train_loader, val_loader: torch
    DataLoaders, of which the dataset and the batch size are taken; items are images or (image, ...). optimizer: of
    create_optimizer; its learning rate, decay and betas win over the config's. loss_fn: of create_loss_from_config, or
    None for the config's. masking_fn: a HierarchicalMaskGenerator whose numbers are taken, or None. device: not used,
    JAX decides. resume_checkpoint: a `.pth` whose weights to start from, and whose optimizer and step to go on with
    where it holds them; a run folder's own state wins, so that the same script goes on after an interruption.

    A subclass may not override the parts of the loop: the step is one compiled function. What replaces them is a task
    of your own (docs/adding_a_system.md): `loss`, `extra_metrics` for more to log, `after_update`.
    """

    PARTS = ("_train_epoch", "_train_step", "_validate_epoch", "_update_target_encoder", "_compute_collapse_metrics")

    def __init__(
        self,
        model: torch.nn.Module,
        train_loader,
        val_loader=None,
        optimizer: torch.optim.Optimizer | None = None,
        loss_fn: torch.nn.Module | None = None,
        masking_fn=None,
        config: Mapping[str, Any] | None = None,
        device: str | None = None,
        resume_checkpoint=None,
    ):
        overridden = [name for name in self.PARTS if hasattr(type(self), name)]
        if overridden:
            raise UserError(
                f"{type(self).__name__} overrides {', '.join(overridden)}, which nothing calls: the step is one "
                "compiled function. Write it as `loss`, `extra_metrics` or `after_update` of a task of your own "
                "(docs/adding_a_system.md)"
            )
        if config is None:
            raise UserError("HJEPATrainer: config is missing; pass the original's nested dict")
        if loss_fn is not None and not hasattr(loss_fn, "section"):
            raise UserError(
                f"HJEPATrainer: loss_fn is {type(loss_fn).__name__}, a torch function, and training runs in JAX; pass "
                "what create_loss_from_config gives, or write the loss in jax.numpy as a task of your own "
                "(docs/adding_a_system.md)"
            )
        self.model, self.config = model, dict(config)
        self.datasets = (train_loader.dataset, None if val_loader is None else val_loader.dataset)
        self.settings = self._settings(train_loader, optimizer, loss_fn, masking_fn, resume_checkpoint)
        checkpoint = self.config.get("checkpoint") or {}
        self.checkpoint_manager = CheckpointManager(
            self.settings.run.dir or "results/checkpoints",
            checkpoint.get("keep_best_n", 3),
            checkpoint.get("save_frequency", 10),
            checkpoint.get("metric_name", "val_loss"),
            checkpoint.get("mode", "min"),
        )
        if resume_checkpoint is not None:
            state = read_checkpoint(resume_checkpoint)["model_state_dict"]
            model.load_state_dict({key: to_torch(value) for key, value in state.items()})

    def _settings(self, train_loader, optimizer, loss_fn, masking_fn, resume_checkpoint):
        import jax

        config = self.config
        config["data"] = dict(config.get("data") or {}) | {"batch_size": train_loader.batch_size}
        values = legacy_config.convert(config, accelerator=jax.default_backend() != "cpu")
        if optimizer is not None:
            group = optimizer.param_groups[0]
            values["optim"] |= {"lr": group["lr"], "weight_decay": group["weight_decay"]}
            if "betas" in group:
                values["optim"] |= dict(zip(("beta1", "beta2"), group["betas"], strict=True))
        if loss_fn is not None:
            values["loss"] = loss_fn.section.model_dump(exclude_unset=True)
        if masking_fn is not None:
            values["masking"] |= {
                "num_masks": masking_fn.num_target_masks,
                "mask_scale": list(masking_fn.level_configs[0]["target_scale"]),
            }
        if resume_checkpoint is not None:
            values["init_from"] = str(resume_checkpoint)
        from jaxtrain import config_io

        return config_io.check(values, "the original's config")[1]

    def train(self) -> dict[str, Any]:
        """Train to the end. Fills `model`, writes checkpoint_latest.pth and checkpoint_best.pth in the original's
        format, and returns the history."""
        from jaxtrain import Trainer
        from jaxtrain.systems.hjepa import TASKS

        task = dataclasses.replace(TASKS["pretrain"], build_data=lambda config, split: None)  # the loaders' data only
        trainer = Trainer(None, *self.datasets, self.settings, task=task)
        trainer.load_state_dict({key: value.cpu().numpy() for key, value in self.model.state_dict().items()})
        history = trainer.train()
        state = {key: to_torch(np.asarray(value)) for key, value in trainer.state_dict().items()}
        self.model.load_state_dict(state)
        epoch = len(history["train_history"]) - 1
        metrics = {"epoch": float(epoch)}
        if history["val_history"]:
            metrics["val_loss"] = history["val_history"][-1]["loss"]
        best = self.checkpoint_manager.update_best_metric(metrics.get("val_loss", float("nan")))
        extra = {"global_step": int(trainer.state.step)}
        self.checkpoint_manager.save_checkpoint(
            epoch, self.model, metrics=metrics, is_best=best, extra_state=extra, config=self.config
        )
        return history
