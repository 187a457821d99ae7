"""Steps of the original trainer's loop, as methods that users can call, override and extend with super().

Everything is torch: the model's own parameters, the given optimizer, tensors with gradients. Only the forward and the
backward pass of model and loss are compiled, one XLA program each (torch_bridge.compiled_call), if they can be
recorded; otherwise torch runs them, and the log says why.

The order is the original's: forward, target update, backward, optimizer. `compat: original` in the config also restores
its faults: gradients of accumulated batches are summed, the target is updated at each of them, and the learning rate is
set after the update.
"""

import contextlib
import numbers
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from jaxtrain.errors import UserError
from jaxtrain.systems.hjepa import metrics
from jaxtrain.systems.hjepa.original.batch_loss import BatchLoss
from torch_bridge.torch_step import clip_and_step

SHOWN = 4  # images per visualisation


class TrainerSteps:
    """Methods for a training step, for training and validation epochs, and for the work after an epoch.

    HJEPATrainer sets the attributes; `Any` are those that users may replace by an object of their own.
    """

    config: Mapping[str, Any]
    device: Any
    device_type: str
    epochs: int
    steps_per_epoch: int
    accumulation_steps: int
    log_frequency: int
    current_epoch: int
    global_step: int
    epochs_without_improvement: int
    best_val_loss: float
    clip_grad: float | None
    use_amp: bool
    original_procedure: bool
    model: Any
    optimizer: Any
    scaler: Any
    loss_fn: Any
    masking_fn: Any
    train_loader: Any
    val_loader: Any
    lr_scheduler: Any
    ema_scheduler: Any
    early_stopping: Any
    checkpoint_manager: Any
    metrics_logger: Any
    progress_tracker: Any
    online_eval_enabled: bool
    online_eval_frequency: int
    online_eval_k: int
    online_eval_max_samples: int
    _batch_loss: BatchLoss
    _log: Callable[[str], None]

    # ---- one step

    def _train_step(self, batch: Any, epoch: int, step: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Compute the loss of a batch and update the target; the caller runs backward. step: of the epoch, from 0.

        Returns the loss, a tensor with its graph, and a dict of the loss function's results. Images: the batch, or its
        first entry.
        """
        images = self._images(batch)
        mask = self._mask(len(images))
        loss, terms, features = self._loss(images, mask)
        if self.original_procedure or (step + 1) % self.accumulation_steps == 0:
            self._update_target_encoder()
        every = 10 * self.log_frequency
        if features and (epoch * self.steps_per_epoch + step // self.accumulation_steps) % every == 0:
            terms = terms | self._compute_collapse_metrics(*features)
        return loss, terms

    def _images(self, batch: Any) -> torch.Tensor:
        if isinstance(batch, Mapping):
            batch = batch["image"] if "image" in batch else batch["images"]
        images = batch[0] if isinstance(batch, (tuple, list)) else batch
        return torch.as_tensor(images).to(self.device, non_blocking=True)

    def _mask(self, batch_size: int) -> torch.Tensor:
        """Draw the patches to predict, bool [batch, patch]: the union of the blocks from masking_fn (its level 0)."""
        drawn = self.masking_fn(batch_size=batch_size, device=self.device)
        if isinstance(drawn, Mapping):
            drawn = drawn["level_0"]["targets"] if "level_0" in drawn else drawn["targets"]
        elif isinstance(drawn, (tuple, list)):
            drawn = drawn[1]
        drawn = torch.as_tensor(drawn).to(self.device)
        return drawn.any(1) if drawn.ndim == 3 else drawn

    def _loss(self, images, mask) -> tuple[torch.Tensor, dict[str, Any], tuple]:
        """Return the loss, its terms, and context and target features if the model returns both."""
        if not self._batch_loss.belongs_to(self.model, self.loss_fn):
            self._batch_loss = BatchLoss(self.model, self.loss_fn, self._autocast, self._log)
        result = self._batch_loss(images, mask)
        return result["loss"], dict(result["terms"]), tuple(result["features"])

    def _autocast(self):
        return torch.autocast(self.device_type) if self.use_amp else contextlib.nullcontext()

    def _backward(self, loss: torch.Tensor) -> None:
        """Run backward on the loss divided by accumulation_steps, so that gradients sum to the big batch's."""
        if self.accumulation_steps > 1 and not self.original_procedure:
            loss = loss / self.accumulation_steps
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def _optimizer_step(self) -> None:
        """Clip gradients, update the weights at this step's learning rate, clear the gradients."""
        if not self.original_procedure:
            self._set_lr(self.lr_scheduler(self.global_step))
        clip_and_step(self.model, self.optimizer, self.clip_grad or None, self.scaler)
        if self.original_procedure:
            self._set_lr(self.lr_scheduler(self.global_step))
        self.global_step += 1

    def _set_lr(self, lr: float | list[float]) -> None:
        """Set one rate for all parameter groups, or one each (HierarchicalScheduler)."""
        groups = self.optimizer.param_groups
        rates = lr if isinstance(lr, (list, tuple)) else [lr] * len(groups)
        if len(rates) != len(groups):
            raise UserError(f"lr_scheduler gives {len(rates)} rates, the optimizer has {len(groups)} parameter groups")
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    @torch.no_grad()
    def _update_target_encoder(self, momentum: float | None = None) -> float:
        """Set target <- m * target + (1 - m) * context; return m.

        momentum: ema_scheduler's at this step if left out; a whole number is a step. A model without a target_encoder
        is not changed (returns 1.0).
        """
        if momentum is None or (isinstance(momentum, int) and not isinstance(momentum, bool)):
            momentum = self.ema_scheduler(self.global_step if momentum is None else momentum)
        model = self._with("target_encoder")
        target, context = (getattr(model, name, None) for name in ("target_encoder", "context_encoder"))
        if target is None or context is None:
            return 1.0
        for theirs, ours in zip(context.parameters(), target.parameters(), strict=True):
            ours.mul_(momentum).add_(theirs, alpha=1 - momentum)
        return float(momentum)

    def _with(self, attribute: str) -> Any:
        """Return the model if it has the attribute, else the one inside it (DataParallel, DistributedDataParallel)."""
        return self.model if hasattr(self.model, attribute) else getattr(self.model, "module", self.model)

    def _compute_collapse_metrics(self, context_features, target_features) -> dict[str, float]:
        """Return context_std, context_norm, context_eff_rank and the target's, for features [batch, ...]."""
        arrays = [x.detach().float().cpu().numpy() for x in (context_features, target_features)]
        return metrics.collapse_metrics(*arrays)

    # ---- one epoch

    def _train_epoch(self, epoch: int | None = None) -> dict[str, float]:
        """Run one pass over train_loader; return the means of the loss and of all other values of the steps.

        With `compat: original` the loss is the last batch's, as in the original.
        """
        epoch = self.current_epoch if epoch is None else epoch
        self.model.train()
        means = _Means()
        shown = tqdm(self.train_loader, desc=f"epoch {epoch + 1}/{self.epochs}", disable=None, leave=False)
        for step, batch in enumerate(shown):
            loss, terms = self._train_step(batch, epoch, step)
            self._backward(loss)
            if (step + 1) % self.accumulation_steps == 0:
                self._optimizer_step()
                self.progress_tracker.step()
            numbers = {**scalars(terms), "loss": float(loss.detach())}
            means.add(numbers)
            self.metrics_logger.accumulate_metrics(numbers)
            if step % self.log_frequency == 0:
                shown.set_postfix(
                    loss=f"{float(loss.detach()):.4f}",
                    eta=self.progress_tracker.get_eta(epoch, step // self.accumulation_steps),
                )
            if step % (5 * self.log_frequency) == 0:
                self._log_step(loss, terms)
        self.metrics_logger.log_accumulated_metrics(self.global_step, "train_epoch/")
        metrics = means.values()
        if self.original_procedure and metrics:
            metrics["loss"] = means.last["loss"]
        return metrics

    def _log_step(self, loss, terms) -> None:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        values = {"lr": rates[0], "ema_momentum": self.ema_scheduler(self.global_step), **scalars(terms)}
        values |= {f"lr_level_{level}": rate for level, rate in enumerate(rates)} if len(rates) > 1 else {}
        self.metrics_logger.log_metrics({**values, "loss": float(loss.detach())}, self.global_step, "train/")
        self.metrics_logger.log_hierarchical_losses(values, self.global_step)

    @torch.no_grad()
    def _validate_epoch(self, epoch: int | None = None) -> dict[str, float]:
        """Return the means over val_loader in evaluation mode, on the same masks every time; {} without a loader."""
        if self.val_loader is None:
            return {}
        self.model.eval()
        means = _Means()
        with contextlib.nullcontext() if self.original_procedure else _fixed_seed():
            for batch in self.val_loader:
                images = self._images(batch)
                loss, terms, _ = self._loss(images, self._mask(len(images)))
                means.add({**scalars(terms), "loss": loss})
        self.model.train()
        return means.values() or {"loss": float("nan")}

    # ---- after an epoch

    def _save_checkpoint(self, epoch: int, val_loss: float | None = None, is_best: bool = False):
        """Write checkpoint_epoch_*.pth, checkpoint_latest.pth and, if best, checkpoint_best.pth; return the first."""
        step = max(0, self.global_step)
        metrics = {"epoch": float(epoch)} | ({} if val_loss is None else {"val_loss": float(val_loss)})
        extra = {"global_step": step, "best_val_loss": float(self.best_val_loss)}
        extra["epochs_without_improvement"] = self.epochs_without_improvement
        if self.early_stopping is not None:
            extra["early_stopping"] = self.early_stopping.state_dict()
        return self.checkpoint_manager.save_checkpoint(
            epoch,
            self.model,
            self.optimizer,
            {"lr": self.lr_scheduler(step), "ema_momentum": self.ema_scheduler(step)},
            self.scaler,
            metrics,
            extra,
            is_best,
            config=self.config,
        )

    def _load_checkpoint(self, path) -> dict[str, Any]:
        """Resume from a file of `_save_checkpoint` or of the original: weights, optimizer, epoch, step, best."""
        state = self.checkpoint_manager.load_checkpoint(path, self.model, self.optimizer, None, self.scaler, None)
        self.current_epoch = int(state.get("epoch", -1)) + 1
        self.global_step = int(state.get("global_step", self.current_epoch * self.steps_per_epoch))
        best = state.get("best_val_loss", state.get("best_metric", self.best_val_loss))
        self.best_val_loss = self.best_val_loss if best is None else float(best)
        self.epochs_without_improvement = int(state.get("epochs_without_improvement", 0))
        if self.early_stopping is not None and "early_stopping" in state:
            self.early_stopping.load_state_dict(state["early_stopping"])
        self._log(f"went on from {path} at epoch {self.current_epoch}, step {self.global_step}")
        return state

    def _check_early_stopping(self, metric: float) -> bool:
        """Count a validation loss (the training loss if there is no validation); return True to end the run."""
        return self.early_stopping is not None and self.early_stopping(metric)

    def _note_validation(self, metric: float) -> bool:
        """Update the best loss and the number of epochs since then; return True for a new best."""
        better = self.checkpoint_manager.update_best_metric(metric)
        self.best_val_loss = min(self.best_val_loss, float(metric))
        self.epochs_without_improvement = 0 if better else self.epochs_without_improvement + 1
        return better

    def _log_epoch_summary(self, epoch: int, train_metrics: Any, val_metrics: Any = None):
        """Log one line with the epoch's losses (dicts with "loss", numbers or None), best loss and times."""
        trained, validated = named(train_metrics), named(val_metrics)
        parts = [f"epoch {epoch + 1}/{self.epochs}", f"train loss {trained.get('loss', float('nan')):.4f}"]
        parts += [f"val loss {validated['loss']:.4f}"] if "loss" in validated else []
        parts += [f"best {self.best_val_loss:.4f}"] if np.isfinite(self.best_val_loss) else []
        seconds = self.progress_tracker.end_epoch()
        parts += [f"{seconds:.1f} s"] if isinstance(seconds, numbers.Real) else []
        self._log(", ".join([*parts, f"ETA {self.progress_tracker.get_eta(epoch + 1, 0)}"]))

    @torch.no_grad()
    def _log_visualizations(self, epoch: int) -> None:
        """Log masked share, prediction-target similarity per level, and embeddings, for a batch's first images."""
        images = self._images(next(iter(self.val_loader or self.train_loader)))[:SHOWN]
        with _fixed_seed():
            mask = self._mask(len(images))
        training = self.model.training
        self.model.eval()
        outputs = self.model(images, mask)
        self.model.train(training)
        logger = self.metrics_logger
        logger.log_metrics({"mask_ratio": mask.float().mean()}, self.global_step, "visualizations/")
        logger.log_prediction_comparison(
            images, outputs["predictions"], outputs["targets"], mask, self.global_step, SHOWN
        )
        if outputs.get("target_features") is not None:
            logger.log_embeddings(outputs["target_features"].mean(1), step=self.global_step)

    def _online_evaluation(self, epoch: int) -> dict[str, float]:
        """Return the knn_accuracy of `training.online_eval` after this epoch; {} if none is due.

        The k train_loader rows nearest by the cosine of target features (level 0, mean over tokens) vote on each
        val_loader row; at most max_samples of each. Raises UserError for a model without extract_features and batches
        without labels.
        """
        if not self._judges_online() or (epoch + 1) % self.online_eval_frequency:
            return {}
        from sklearn.neighbors import KNeighborsClassifier

        most = self.online_eval_max_samples
        (known, labels), (asked, val_labels) = (self._features(x, most) for x in (self.train_loader, self.val_loader))
        neighbours = KNeighborsClassifier(min(self.online_eval_k, len(known)), metric="cosine").fit(known, labels)
        scores = {"knn_accuracy": float((neighbours.predict(asked) == val_labels).mean())}
        self.metrics_logger.log_metrics(scores, self.global_step, "online_eval/")
        return scores

    def _judges_online(self) -> bool:
        """Return True if online_eval_enabled is set and something is validated.

        Raises UserError for a model without features.
        """
        if not self.online_eval_enabled or self.val_loader is None:
            return False
        model = self._with("extract_features")
        if not hasattr(model, "extract_features"):
            raise UserError(f"training.online_eval: {type(model).__name__} has no extract_features(images, level=0)")
        return True

    @torch.no_grad()
    def _features(self, loader: Any, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Return unit features [row, width] and labels [row] of a loader's first rows."""
        model = self._with("extract_features")
        training, rows, labels = model.training, [], []
        model.eval()
        for batch in loader:
            if isinstance(batch, torch.Tensor) or len(batch) < 2:
                raise UserError("training.online_eval: the loader gives images without labels")
            features = model.extract_features(self._images(batch), level=0).float().mean(1)
            rows.append(torch.nn.functional.normalize(features, dim=1).cpu().numpy())
            batch_labels = (
                (batch["label"] if "label" in batch else batch["labels"]) if isinstance(batch, Mapping) else batch[1]
            )
            labels.append(np.asarray(batch_labels))
            if sum(map(len, rows)) >= most:
                break
        model.train(training)
        return np.concatenate(rows)[:most], np.concatenate(labels)[:most]


def named(values: Any) -> dict[str, float]:
    """Return an epoch's results by name; a single number, from an override, is the loss, and None is no result."""
    if values is None:
        return {}
    return dict(values) if isinstance(values, Mapping) else {"loss": float(values)}


def scalars(terms: Mapping[str, Any]) -> dict[str, float]:
    """Return the entries that are a single number, finite or not."""
    numbers_by_name = {}
    for name, value in terms.items():
        if isinstance(value, torch.Tensor):
            if value.numel() == 1:
                numbers_by_name[name] = float(value.detach())
        elif isinstance(value, (int, float, np.number)) and not isinstance(value, bool):
            numbers_by_name[name] = float(value)
    return numbers_by_name


class _Means:
    """Running means of named numbers; a name may be missing from some calls."""

    def __init__(self):
        self.sums: dict[str, list] = {}
        self.last: dict[str, float] = {}

    def add(self, terms: Mapping[str, Any]) -> None:
        self.last = {
            name: float(value.detach() if hasattr(value, "detach") else value) for name, value in terms.items()
        }
        for name, value in self.last.items():
            total = self.sums.setdefault(name, [0.0, 0])
            total[0] += value
            total[1] += 1

    def values(self) -> dict[str, float]:
        return {name: total / count for name, (total, count) in self.sums.items()}


@contextlib.contextmanager
def _fixed_seed() -> Iterator[None]:
    """Seed numpy's and torch's generators inside the context and restore their states afterwards."""
    state = np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        np.random.seed(0)
        try:
            yield
        finally:
            np.random.set_state(state)
