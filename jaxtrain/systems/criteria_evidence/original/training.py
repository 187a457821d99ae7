"""The original's Trainer with its arguments, attributes, methods, log and checkpoint files, but compiled steps.

The loop is plain Python with one call of a compiled program (jaxtrain.compile) per batch, so each method can be called,
overridden and extended with super(). `model` and `optimizer` are torch objects; reading one synchronises its values
first. If model, loss or optimizer cannot be compiled (a branch on a tensor's values, a mock), a warning says why and
torch runs the steps.
"""

import inspect
import logging
import pathlib
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from jaxtrain.compat.synced_objects import SyncedObjects
from jaxtrain.compiled_step.or_torch import StepOrTorch
from jaxtrain.errors import UserError
from jaxtrain.systems.criteria_evidence import metrics as scores
from torch_bridge.datasets import to_numpy

log = logging.getLogger(__name__)

Scores = dict[str, Any]


def __getattr__(name: str) -> Any:
    """Return `mlflow`, imported on first use. The original's module imports it, and tests patch it there."""
    if name == "mlflow":
        import mlflow

        return mlflow
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class UnknownMetric(UserError, KeyError):
    """Raised if early_stopping_metric is not among the metrics of an epoch; also a KeyError."""

    def __str__(self) -> str:
        return str(self.args[0])


def _alias(name: str) -> Any:
    return property(lambda self: getattr(self, name), lambda self, value: setattr(self, name, value))


class Trainer(SyncedObjects):
    """Trainer of a classifier on batches of input_ids, attention_mask and labels.

    criterion: a torch loss of (logits, labels). scheduler: a torch lr_scheduler, stepped after every update and, as in
    the original, once more after every epoch. An incomplete last group of gradient_accumulation_steps batches makes no
    update, as in the original. use_amp: has an effect on a CUDA device only; float16 and bfloat16 both compute in
    bfloat16, which needs no loss scaling. save_dir: folder for latest_checkpoint.pt (after every epoch) and
    best_checkpoint.pt (the best one).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        train_loader: Any,
        val_loader: Any,
        optimizer: torch.optim.Optimizer,
        criterion: Any,
        device: torch.device | str = "cpu",
        num_epochs: int = 10,
        patience: int = 3,
        gradient_clip: float = 1.0,
        gradient_accumulation_steps: int = 1,
        scheduler: Any = None,
        save_dir: str | pathlib.Path | None = None,
        use_amp: bool = True,
        amp_dtype: torch.dtype | str = "float16",
        early_stopping_metric: str = "val_f1_macro",
        early_stopping_mode: str = "max",
        min_delta: float = 1e-4,
        logging_steps: int = 100,
    ):
        if early_stopping_mode not in ("max", "min"):
            raise UserError(f"early_stopping_mode: {early_stopping_mode!r}, wanted max or min")
        amp_dtype = str(amp_dtype).removeprefix("torch.")
        if amp_dtype not in ("float16", "bfloat16"):
            raise UserError(f"amp_dtype: {amp_dtype!r}, wanted float16 or bfloat16")
        self.device = torch.device(device)
        self._model, self._optimizer = model.to(self.device), optimizer
        self.train_loader, self.val_loader, self.criterion, self.scheduler = (
            train_loader,
            val_loader,
            criterion,
            scheduler,
        )
        self.num_epochs, self.patience, self.min_delta = num_epochs, patience, min_delta
        self.gradient_clip, self.gradient_accumulation_steps = gradient_clip, gradient_accumulation_steps
        self.save_dir = None if save_dir is None else pathlib.Path(save_dir)
        self.use_amp, self.amp_dtype = use_amp and self.device.type == "cuda", getattr(torch, amp_dtype)
        if self.use_amp and amp_dtype == "float16":
            log.info("amp_dtype float16: computed in bfloat16, which needs no loss scale")
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=False)
        self.early_stopping_metric, self.early_stopping_mode = early_stopping_metric, early_stopping_mode
        self.logging_steps = logging_steps
        self.best_metric_value = float("-inf") if early_stopping_mode == "max" else float("inf")
        self.patience_counter = self.global_step = self.current_epoch = 0
        self.training_history: list[Scores] = []  # the metrics of every epoch

    # --- aliases: other trainers' names ---------------------------------------------------------------------------

    epochs, lr_scheduler, loss_fn = _alias("num_epochs"), _alias("scheduler"), _alias("criterion")
    clip_grad, accumulation_steps = _alias("gradient_clip"), _alias("gradient_accumulation_steps")
    best_metric, epochs_without_improvement = _alias("best_metric_value"), _alias("patience_counter")

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of updates per epoch; an incomplete last group makes none."""
        return len(self.train_loader) // self.gradient_accumulation_steps

    # --- the compiled step ----------------------------------------------------------------------------------------

    def _step_parts(self) -> tuple:
        options = (self.gradient_clip, self.gradient_accumulation_steps, self.use_amp)
        return self._model, self._optimizer, self.criterion, *options

    def _new_step(self) -> StepOrTorch:
        return StepOrTorch(
            self._model,
            self._loss,
            self._optimizer,
            clip_norm=self.gradient_clip or None,
            precision="bf16" if self.use_amp else "fp32",
            say=lambda line: warnings.warn(f"Trainer: {line}", stacklevel=2),
        )

    def _loss(self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict]:
        loss, logits = self.compute_loss(model, batch)
        right = (logits.argmax(-1) == batch["labels"]).sum()
        return loss / self.gradient_accumulation_steps, {"loss": loss, "correct": right}

    # --- the steps of the loop ------------------------------------------------------------------------------------

    def compute_loss(
        self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss and the logits of a batch. Written in torch, but recorded once and compiled."""
        logits = model(batch["input_ids"], batch["attention_mask"])
        return self.criterion(logits, batch["labels"]), logits

    def training_step(self, batch: Mapping[str, Any], update: bool = True) -> Scores:
        """Run forward and backward, and with `update` gradient clipping, optimizer and scheduler.

        Returns `loss` and `correct` (number of correct rows), computed asynchronously: reading one waits for it.
        Without `update` the gradients are accumulated for the next call.
        """
        tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        _, values = self._step()(tensors, update=update)
        if update:
            if self.scheduler is not None:
                self.scheduler.step()
            self.global_step += 1
        return values

    def train_epoch(self, epoch: int = 0) -> Scores:
        """Run one pass over the training data; return train_loss (mean over batches) and train_accuracy.

        Raises UserError if the loader is empty.
        """
        self._model.train()
        self._step().drop_gradients()  # left over from an incomplete group of the previous epoch
        losses, correct, seen = [], [], 0
        for index, batch in enumerate(self.train_loader):
            update = (index + 1) % self.gradient_accumulation_steps == 0
            values = self.training_step(batch, update)
            losses.append(values["loss"])
            correct.append(values["correct"])
            seen += len(batch["labels"])
            if update and self.global_step % self.logging_steps == 0:
                rate = self._optimizer.param_groups[0]["lr"]
                self.log_metrics({"train_loss_step": float(losses[-1]), "learning_rate": rate}, self.global_step)
        self._sync()
        if not losses:
            raise UserError("train_loader gave no batch")
        return {"train_loss": float(np.mean([float(x) for x in losses]))} | {
            "train_accuracy": float(sum(float(x) for x in correct)) / max(seen, 1)
        }

    @torch.no_grad()
    def validate(self) -> Scores:
        """Return the metrics of val_loader: val_loss (mean over batches), val_accuracy, val_f1_macro, val_f1_micro,
        val_precision_macro, val_recall_macro, val_auroc_macro. Leaves the model in eval mode, as the original does."""
        self._model.eval()
        step, logits, labels, losses = self._step(), [], [], []
        for batch in self.val_loader:
            out = step.forward(batch["input_ids"], batch["attention_mask"])
            losses.append(float(self.criterion(out.float(), batch["labels"].to(out.device))))
            logits.append(to_numpy(out))
            labels.append(to_numpy(batch["labels"]))
        if not losses:
            raise UserError("val_loader gave no batch")
        metrics = scores.validation_scores(np.concatenate(logits), np.concatenate(labels), 1)
        return metrics | {"val_loss": float(np.mean(losses))}

    def train(self) -> Scores:
        """Train until the last epoch or `patience` epochs without improvement; return best_<metric> and total_epochs.

        Raises UnknownMetric if early_stopping_metric is not among an epoch's metrics.
        """
        epochs = 0
        for epoch in range(self.num_epochs):
            self.current_epoch, started = epoch, time.time()
            metrics = {**_of_epoch(self.train_epoch, epoch), **_of_epoch(self.validate, epoch)}
            if self.scheduler is not None:
                self.scheduler.step()
            metrics |= {"epoch": epoch + 1, "lr": self._optimizer.param_groups[0]["lr"]}
            metrics["epoch_time"] = time.time() - started
            self.training_history.append(dict(metrics))
            self.log_metrics(metrics, epoch)
            print(self.epoch_summary(metrics), flush=True)
            epochs = epoch + 1
            if self.early_stopping_metric not in metrics:
                raise UnknownMetric(
                    f"early_stopping_metric: {self.early_stopping_metric!r} is not among {', '.join(sorted(metrics))}"
                )
            improved = self.check_improvement(metrics[self.early_stopping_metric])
            self.save_checkpoint(epoch, metrics, improved)
            if self.patience_counter >= self.patience:
                print(f"Early stopping after epoch {epochs}: {self.patience} without improvement", flush=True)
                break
        self._sync()
        final = {f"best_{self.early_stopping_metric}": self.best_metric_value, "total_epochs": epochs}
        self.log_metrics(final, None)
        return final

    def check_improvement(self, current_value: float) -> bool:
        """Return True if the value beats the best by more than min_delta; update the best value and the patience."""
        improved = scores.improved(
            float("nan") if current_value is None else current_value,
            self.best_metric_value,
            self.early_stopping_mode,
            self.min_delta,
        )
        if improved:
            self.best_metric_value = current_value
        self.patience_counter = 0 if improved else self.patience_counter + 1
        return improved

    def epoch_summary(self, metrics: Mapping[str, Any]) -> str:
        """Return the line that is printed after an epoch."""
        shown = ("train_loss", "train_accuracy", "val_loss", self.early_stopping_metric)
        parts = [f"{name}: {metrics[name]:.4f}" for name in shown if isinstance(metrics.get(name), float)]
        return f"Epoch {metrics['epoch']}/{self.num_epochs} - {' - '.join(parts)} - {metrics['epoch_time']:.1f}s"

    def log_metrics(self, values: Mapping[str, Any], step: int | None) -> None:
        """Log to the script's active MLflow run, if there is one, or to a replaced mlflow.log_metrics."""
        mlflow = globals().get("mlflow", sys.modules.get("mlflow"))
        if mlflow is None or not (_is_replaced(mlflow) or mlflow.active_run() is not None):
            return
        numbers = {name: value for name, value in values.items() if value is not None}
        mlflow.log_metrics(numbers) if step is None else mlflow.log_metrics(numbers, step=step)

    # --- files ----------------------------------------------------------------------------------------------------

    def save_checkpoint(self, epoch: int, metrics: Mapping[str, Any], is_best: bool = False) -> None:
        """Write latest_checkpoint.pt, and best_checkpoint.pt if is_best, under save_dir; nothing without save_dir."""
        if self.save_dir is None:
            return
        state = {
            "epoch": epoch,
            "global_step": self.global_step,
            "model_state_dict": self.model.state_dict(),
            "optimizer_state_dict": self.optimizer.state_dict(),
            "metrics": dict(metrics),
            "best_metric_value": self.best_metric_value,
            "scaler_state_dict": self.scaler.state_dict(),
        }
        if self.scheduler is not None:
            state["scheduler_state_dict"] = self.scheduler.state_dict()
        self.save_dir.mkdir(parents=True, exist_ok=True)
        torch.save(state, self.save_dir / "latest_checkpoint.pt")
        if is_best:
            torch.save(state, self.save_dir / "best_checkpoint.pt")

    _save_checkpoint = save_checkpoint

    def load_checkpoint(self, path: str | pathlib.Path) -> dict[str, Any]:
        """Load weights, optimizer, scheduler, counters and best value from a checkpoint file; return its content.

        The original writes such files but cannot read them.
        """
        state = torch.load(path, map_location="cpu", weights_only=True)
        self._forget_step()
        plain = getattr(self._model, "_orig_mod", self._model)  # torch.compile prefixes the keys
        plain.load_state_dict({key.removeprefix("_orig_mod."): x for key, x in state["model_state_dict"].items()})
        self._optimizer.load_state_dict(state["optimizer_state_dict"])
        if self.scheduler is not None and "scheduler_state_dict" in state:
            self.scheduler.load_state_dict(state["scheduler_state_dict"])
        self.current_epoch, self.global_step = state["epoch"], state["global_step"]
        self.best_metric_value = state["best_metric_value"]
        return state


def _of_epoch(method: Callable[..., Scores], epoch: int) -> Scores:
    """Call train_epoch or validate; a user's override may omit the parameter `epoch`."""
    try:
        inspect.signature(method).bind(epoch)
    except TypeError:
        return method()
    return method(epoch)


def _is_replaced(mlflow: Any) -> bool:
    """Return True for another log_metrics than mlflow's own, which would open a run and write mlflow.db."""
    module = sys.modules.get("mlflow.tracking.fluent")
    return module is not None and mlflow.log_metrics is not module.log_metrics
