"""HJEPATrainer: the original's trainer, one loop in Python with model and loss compiled."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from jaxtrain.errors import UserError
from jaxtrain.systems.hjepa.original.batch_loss import BatchLoss
from jaxtrain.systems.hjepa.original.hjepa_model import HJEPA
from jaxtrain.systems.hjepa.original.legacy_config import EPOCHS, tracking
from jaxtrain.systems.hjepa.original.loss_registry import create_loss_from_config
from jaxtrain.systems.hjepa.original.mask_generators import HierarchicalMaskGenerator
from jaxtrain.systems.hjepa.original.metrics_logger import MetricsLogger
from jaxtrain.systems.hjepa.original.progress import EarlyStopping, ProgressTracker
from jaxtrain.systems.hjepa.original.schedules import create_ema_scheduler, create_lr_scheduler
from jaxtrain.systems.hjepa.original.torch_checkpoint import CheckpointManager, available
from jaxtrain.systems.hjepa.original.torch_compat import create_masking_function, create_optimizer
from jaxtrain.systems.hjepa.original.trainer_steps import TrainerSteps, named, scalars

logger = logging.getLogger("hjepa")  # not a child of "jaxtrain", whose lines go to a run's train.log


class HJEPATrainer(TrainerSteps):
    """Trainer of a torch model with a masked, hierarchical joint-embedding objective.

    model: HJEPA, or any module that maps (images, mask) to a dict with predictions and targets per level, and
    context_features and target_features if the loss or the collapse metrics need them.
    train_loader, val_loader: torch DataLoaders, or any iterables with a length, of images or of tuples with
    the images first.
    optimizer: torch's; create_optimizer(model, config) if left out.
    loss_fn: called with those of predictions=, targets=, context_features= that it takes; returns a dict with "loss",
    (loss, dict) or the loss.
    masking_fn: called with batch_size= and device=; returns {"level_0": {"targets": bool [batch, block, patch]}}.
    config: the original's nested dict. device: used if torch has it, else the CPU.
    resume_checkpoint: a file to resume from.

    `train()` calls the methods of `TrainerSteps`, which you may override. Forward and backward of model and loss are
    compiled; where they cannot be, torch runs them, and a line gives the reason.
    """

    def __init__(
        self,
        model: nn.Module,
        train_loader: Any,
        val_loader: Any = None,
        optimizer: torch.optim.Optimizer | None = None,
        loss_fn: Any = None,
        masking_fn: Any = None,
        config: Mapping[str, Any] | None = None,
        device: str | torch.device = "cuda",
        resume_checkpoint: Any = None,
    ):
        if config is None:
            raise UserError("HJEPATrainer: config is missing; pass the original's nested dict")
        self.config = config
        training = self.config.get("training") or {}
        self.original_procedure = self.config.get("compat") == "original"
        self.device = available(device)
        self.device_type = torch.device(self.device).type
        self.model = model.to(self.device)
        self.train_loader, self.val_loader = train_loader, val_loader
        self.optimizer = create_optimizer(model, self.config) if optimizer is None else optimizer
        self.loss_fn = self._default_loss() if loss_fn is None else loss_fn
        if isinstance(self.loss_fn, nn.Module):
            self.loss_fn.to(self.device)
        self.masking_fn = self._default_masks() if masking_fn is None else masking_fn
        self.epochs = training.get("epochs", EPOCHS)
        self.accumulation_steps = training.get("accumulation_steps", 1)
        self.clip_grad = training.get("clip_grad")
        self.steps_per_epoch = max(1, len(train_loader) // self.accumulation_steps)
        self.use_amp = self._amp(training.get("use_amp", False))
        self.scaler = torch.amp.GradScaler(self.device_type) if self.use_amp else None
        self.lr_scheduler = self._plan_lr(training)
        self.ema_scheduler = self._plan_momentum(training)
        self._set_up_records(training)
        self.current_epoch = self.global_step = 0
        self.best_val_loss = float("inf")
        self.epochs_without_improvement = 0
        self._batch_loss = BatchLoss(self.model, self.loss_fn, self._autocast, self._log)
        if resume_checkpoint is not None:
            self._load_checkpoint(resume_checkpoint)

    def _set_up_records(self, training: Mapping[str, Any]) -> None:
        """Create the checkpoint manager, logger, progress tracker and early stopping."""
        checkpoint, logging_ = self.config.get("checkpoint") or {}, self.config.get("logging") or {}
        self.log_frequency = logging_.get("log_frequency", 100)
        self.warmup_epochs = training.get("warmup_epochs", 0)
        online = training.get("online_eval") or {}
        self.online_eval_enabled, self.online_eval_type = bool(online.get("enabled", False)), online.get("type", "knn")
        self.online_eval_frequency, self.online_eval_k = online.get("frequency", 10), online.get("k", 20)
        self.online_eval_max_samples = online.get("max_samples", 2000)
        self.checkpoint_manager = CheckpointManager(
            checkpoint.get("checkpoint_dir", "results/checkpoints"),
            checkpoint.get("keep_best_n", 3),
            checkpoint.get("save_frequency", 10),
            checkpoint.get("metric", checkpoint.get("metric_name", "val_loss")),
            checkpoint.get("mode", "min"),
        )
        trackers, wandb = tracking(logging_), logging_.get("wandb")
        wandb = wandb if isinstance(wandb, Mapping) else {}
        self.metrics_logger = MetricsLogger(
            logging_.get("experiment_name", "hjepa"),
            logging_.get("log_dir", self.checkpoint_manager.checkpoint_dir / "logs"),
            self.config,
            trackers["wandb"],
            trackers["tensorboard"],
            trackers.get("wandb_project", "h-jepa"),
            wandb.get("entity"),
            wandb.get("tags"),
        )
        self.progress_tracker = ProgressTracker(self.epochs, self.steps_per_epoch)
        stopping = training.get("early_stopping") or {}
        options = {name: stopping[name] for name in ("patience", "min_delta", "mode") if name in stopping}
        self.early_stopping = EarlyStopping(**options) if stopping.get("enabled") else None

    def _default_loss(self) -> nn.Module:
        model = dict(self.config.get("model") or {})
        if isinstance(self.model, HJEPA):
            model["num_hierarchies"] = self.model.num_hierarchies
        return create_loss_from_config({**self.config, "model": model})

    def _default_masks(self) -> HierarchicalMaskGenerator:
        model = self.model
        if not isinstance(model, HJEPA):
            return create_masking_function(self.config)
        masks = create_masking_function(
            {"masking": self.config.get("masking"), "model": {"num_hierarchies": model.num_hierarchies}}
        )
        return HierarchicalMaskGenerator(
            model.img_size,
            model.get_patch_size(),
            model.num_hierarchies,
            masks.num_target_masks,
            base_scale=masks.base_scale,
            aspect_ratio_range=masks.aspect_ratio_range,
        )

    def _amp(self, asked: bool) -> bool:
        if asked and self.device_type != "cuda":
            logger.warning("use_amp (mixed precision) has no effect on %s: numbers stay float32", self.device_type)
        return bool(asked) and self.device_type == "cuda"

    def _plan_lr(self, training: Mapping[str, Any]):
        """Return the rate per optimizer step: training.lr, else the optimizer's, decaying to min_lr."""
        smallest = (training.get("scheduler_params") or {}).get("min_lr")
        if smallest is None:
            smallest = 1e-6 if self.original_procedure else training.get("min_lr", 1e-6)
        base = training.get("lr", training.get("learning_rate"))
        return create_lr_scheduler(
            base_lr=self.optimizer.param_groups[0]["lr"] if base is None else base,
            min_lr=smallest,
            epochs=self.epochs,
            steps_per_epoch=self.steps_per_epoch,
            warmup_epochs=training.get("warmup_epochs", 0),
            schedule_type=training.get("lr_schedule", "cosine"),
        )

    def _plan_momentum(self, training: Mapping[str, Any]):
        """Return the target's momentum per optimizer step: training.ema_momentum_schedule, else model.ema.

        model.ema, which the original ignores, means linear from `momentum` to `momentum_end`, reached after
        momentum_warmup_epochs or at the end.
        """
        schedule, ema = training.get("ema_momentum_schedule"), (self.config.get("model") or {}).get("ema") or {}
        if schedule is not None or self.original_procedure:
            schedule = schedule or {}
            warmup = schedule.get("warmup_steps", 1000 if self.original_procedure else 0)
            start, end, epochs = schedule.get("start", 0.996), schedule.get("end", 1.0), self.epochs
            return create_ema_scheduler(start, end, epochs, self.steps_per_epoch, warmup // self.steps_per_epoch)
        epochs = ema.get("momentum_warmup_epochs") or self.epochs
        return create_ema_scheduler(
            ema.get("momentum", 0.996), ema.get("momentum_end", 1.0), epochs, self.steps_per_epoch
        )

    def train(self) -> dict[str, Any]:
        """Train from current_epoch to the end; return train_history, val_history (a dict per epoch) and best_val_loss.

        Writes checkpoint_epoch_*.pth and checkpoint_latest.pth every save_frequency epochs and after each best one,
        then also checkpoint_best.pth. Without resume_checkpoint it starts from the model as given, whatever
        checkpoint_dir holds.
        """
        self._judges_online()  # report a mistake before the first epoch
        history: dict[str, Any] = {"train_history": [], "val_history": []}
        for epoch in range(self.current_epoch, self.epochs):
            self.current_epoch = epoch
            self.progress_tracker.start_epoch()
            trained = named(self._train_epoch(epoch))
            history["train_history"].append(trained)
            self.metrics_logger.log_metrics(scalars(trained), self.global_step, "train/")
            validated = named(self._validate_epoch(epoch)) if self.val_loader is not None else {}
            if validated:
                history["val_history"].append(validated)
                self.metrics_logger.log_metrics(scalars(validated), self.global_step, "val/")
            judged = (validated or trained).get("loss", float("nan"))
            is_best = "loss" in validated and self._note_validation(judged)
            if self.checkpoint_manager.should_save(epoch) or is_best:
                self._save_checkpoint(epoch, validated.get("loss"), is_best)
            if (epoch + 1) % 10 == 0:
                self.metrics_logger.log_system_metrics(self.global_step)
            if (epoch + 1) % 5 == 0:
                self._log_visualizations(epoch)
            validated |= self._online_evaluation(epoch)
            if self._check_early_stopping(judged):
                self._log(f"early stop at epoch {epoch + 1}: best loss {self.best_val_loss:.6g}")
                break
            self._log_epoch_summary(epoch, trained, validated)
        self.metrics_logger.finish()
        return history | {"best_val_loss": self.best_val_loss}

    def _log(self, line: str) -> None:
        """Log a line with this module's logger if logging is set up for INFO, else print it above the progress bar."""
        if logger.hasHandlers() and logger.isEnabledFor(logging.INFO):
            logger.info(line)
        else:
            tqdm.write(line)
