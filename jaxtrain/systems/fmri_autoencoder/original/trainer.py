"""The original's Trainer with its attributes, methods and files: a loop in Python, a compiled call a batch."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import torch
from tqdm import tqdm

from jaxtrain.compat.synced_objects import SyncedObjects
from jaxtrain.compiled_step.or_torch import StepOrTorch
from jaxtrain.errors import UserError
from jaxtrain.systems.fmri_autoencoder.original import trainer_setup
from jaxtrain.systems.fmri_autoencoder.original.legacy_config import TrainingConfig
from jaxtrain.systems.fmri_autoencoder.original.torch_schedule import scheduler_of
from jaxtrain.systems.fmri_autoencoder.torch_blocks import read_checkpoint
from jaxtrain.systems.fmri_autoencoder.torch_losses import compute_correlation_metric, compute_r2_score, criterion
from torch_bridge.from_torch import unwrapped

KINDS = ("video", "audio", "text")


class Trainer(SyncedObjects):
    """Trainer of an autoencoder; `history = Trainer(model, train_dataset, val_dataset, config).train()`.

    model: from create_autoencoder, or any torch module that takes (video, audio, text) and returns their dict.
    train_dataset, val_dataset: torch Datasets of dicts with `video`, `audio`, `text`, `fmri`; val_dataset may be None.
    config.resume_from: a checkpoint file to resume from, or a folder, whose newest checkpoint_epoch_N.pt is taken.
    Without it the given model is trained from the first epoch, whatever checkpoint_dir holds. distributed, local_rank,
    world_size: accepted, not used; call setup_distributed() first, and every process takes its part.

    Every method of the loop may be overridden or called by itself. `trainer.model` and `trainer.optimizer` always
    return the current weights and optimizer state.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        train_dataset,
        val_dataset=None,
        config: TrainingConfig | None = None,
        distributed: bool = False,
        local_rank: int = 0,
        world_size: int = 1,
    ):
        if not isinstance(model, torch.nn.Module):
            raise UserError(
                f"Trainer: the model is {type(model).__name__}, wanted a torch.nn.Module (create_autoencoder)"
            )
        self.config = TrainingConfig() if config is None else config
        self.train_dataset, self.val_dataset = train_dataset, val_dataset
        self.distributed, self.local_rank, self.world_size = distributed, local_rank, world_size
        self.is_main_process = jax.process_index() == 0
        self._model = unwrapped(model)
        self.device = torch.device("cpu") if self._is_on_meta() else _device_of(self._model)
        self.current_epoch = self.global_step = self.epochs_without_improvement = 0
        self.best_val_loss = self._least_val_loss = float("inf")
        self.train_history: list[dict[str, float]] = []
        self.val_history: list[dict[str, float]] = []
        self.checkpoint_dir, self.log_dir = pathlib.Path(self.config.checkpoint_dir), pathlib.Path(self.config.log_dir)
        self._order = (
            torch.Generator()
        )  # of the samples: a function of seed and epoch, so that a resumed run repeats it
        self.train_loader = self._loader(train_dataset, True)
        self.val_loader = None if val_dataset is None else self._loader(val_dataset, False)
        self.settings = trainer_setup.run_settings(self.config, self._model, len(train_dataset))
        self.criterion = criterion(self.settings)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=self.config.learning_rate, weight_decay=self.config.weight_decay
        )
        steps = len(self.train_loader)
        self.scheduler = scheduler_of(self.settings, self._optimizer, steps, self.config.num_epochs)
        self.warmup_scheduler = self.scheduler if self.config.warmup_epochs and self.scheduler is not None else None
        self.scaler = torch.amp.GradScaler("cuda", enabled=False) if self.config.use_mixed_precision else None
        if self.is_main_process:
            for folder in (self.checkpoint_dir, self.log_dir):
                folder.mkdir(parents=True, exist_ok=True)
        if (resumed := trainer_setup.checkpoint_to_resume(self.config.resume_from)) is not None:
            self.load_checkpoint(resumed)
            total = self.config.num_epochs * steps
            self._say(f"went on from {resumed} at step {self.global_step} of {total}")

    def _loader(self, dataset, train: bool) -> torch.utils.data.DataLoader:
        workers = trainer_setup.worker_count(dataset, self.config.num_workers, self._say)
        batch = self.config.batch_size
        return torch.utils.data.DataLoader(
            dataset,
            batch_size=max(1, min(batch, len(dataset))) if train else batch,
            shuffle=train,
            drop_last=train,
            num_workers=workers,
            pin_memory=self.config.pin_memory and torch.cuda.is_available(),
            multiprocessing_context="forkserver" if workers else None,  # JAX's threads do not survive a fork
            generator=self._order if train else None,
        )

    model_module = property(lambda self: unwrapped(self.model), doc="The module without DDP's wrapper.")

    def _is_on_meta(self) -> bool:
        return trainer_setup.is_on_meta(self._model)

    # --- the run ------------------------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """Train to the end; return train_history, val_history (lists of dicts) and best_val_loss.

        Writes checkpoint_epoch_N.pt, best_checkpoint.pt and final_checkpoint.pt into config.checkpoint_dir on the way.
        """
        self._say_banner()
        first = max(self.current_epoch, self.global_step // max(1, len(self.train_loader)))
        if first >= self.config.num_epochs:
            self._say(f"nothing is left to train: {self.config.num_epochs} epochs are done")
        else:
            self._check_batches()
        for epoch in range(first, self.config.num_epochs):
            self.current_epoch = epoch
            metrics = self._train_epoch(epoch)
            self._sync()  # in every process, before the first one saves
            due = self.val_loader is not None and epoch % self.config.validate_every == 0
            if self.end_epoch(epoch, metrics, self._validate(epoch) if due else None):
                break
        if self.is_main_process:
            self.save_checkpoint(self.config.num_epochs, is_final=True)  # as in the original, stopped early or not
        return self.history()

    def _check_batches(self) -> None:
        rows = getattr(self.train_loader, "batch_size", None)
        if not len(self.train_loader):
            raise UserError(f"Trainer: no full batch of {rows} in {len(self.train_dataset)} samples")
        if rows == 1 and isinstance(self._model, trainer_setup.STOCK):
            raise UserError(
                "Trainer: training on batches of 1 (config.batch_size, or as many samples), wanted 2 or more: "
                "BatchNorm expects more than 1 value per channel when training"
            )

    def history(self) -> dict[str, Any]:
        """Return train_history, val_history, best_val_loss."""
        names = ("train_history", "val_history", "best_val_loss")
        return {name: getattr(self, name) for name in names}

    def end_epoch(
        self, epoch: int, train_metrics: Mapping[str, float], val_metrics: Mapping[str, float] | None
    ) -> bool:
        """Record an epoch: histories, log line, checkpoints, early stopping. Return True if the run is over."""
        self.train_history.append(dict(train_metrics))
        improved = stop = False
        val_loss = None
        if val_metrics is not None:
            self.val_history.append(dict(val_metrics))
            val_loss = val_metrics["total_loss"]
            improved = val_loss < self._least_val_loss  # a NaN is no improvement
            self._least_val_loss = val_loss if improved else self._least_val_loss
            stop = self.check_early_stopping(val_loss)
        self.log_epoch(epoch, train_metrics, val_metrics)
        if self.is_main_process and epoch % self.config.save_every == 0:
            self.save_checkpoint(epoch, val_loss, is_best=improved)
        elif self.is_main_process and improved:
            self._write("best_checkpoint.pt", self.checkpoint(epoch, val_loss))
        if stop:
            self._say(f"Early stopping triggered after {epoch + 1} epochs")
        return stop

    def check_early_stopping(self, val_loss: float) -> bool:
        """Count epochs not early_stopping_delta below best_val_loss; return True from early_stopping_patience on."""
        if self.best_val_loss - val_loss > self.config.early_stopping_delta:
            self.best_val_loss, self.epochs_without_improvement = val_loss, 0
        else:
            self.epochs_without_improvement += 1
        return self.epochs_without_improvement >= self.config.early_stopping_patience

    # --- the loop's steps ---------------------------------------------------------------------------------------

    def train_epoch(self, epoch: int | None = None) -> dict[str, float]:
        """Run one pass over train_loader; return the means of the steps' losses, and the learning rate after it."""
        self.model.train()
        self._order.manual_seed(self.settings.seed + (self.current_epoch if epoch is None else epoch))
        sums: dict[str, Any] = {}
        title = "Training" if epoch is None else f"Epoch {epoch + 1}"
        for batch in tqdm(self.train_loader, desc=title, leave=False, disable=None if self.is_main_process else True):
            losses = self.train_step(batch)
            for name, value in (losses if isinstance(losses, Mapping) else {"total_loss": losses}).items():
                sums[name] = sums.get(name, 0.0) + (value.detach() if hasattr(value, "detach") else value)
        means = {name: float(value) / len(self.train_loader) for name, value in sums.items()}
        return {**means, "lr": float(self._optimizer.param_groups[0]["lr"])}

    def train_step(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Run forward, backward, clipping, update and schedule; return the losses (reading them waits for the step)."""
        step = self._step()
        if not self._model.training:
            self._model.train()
        loss = step({name: batch[name] for name in (*KINDS, "fmri")})
        self.global_step += 1
        total, parts = loss if isinstance(loss, tuple) else (loss, {})
        return {"total_loss": total, **{name: value for name, value in parts.items() if name != "total_loss"}}

    def compute_loss(self, outputs: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]):
        """Return the criterion's total for a batch, and a dict of its terms if the criterion returns one."""
        return self.criterion(outputs, *(batch[name] for name in KINDS), batch["fmri"])

    def validate(self) -> dict[str, float]:
        """Return means over val_loader's rows of the criterion's terms, fmri_correlation and fmri_r2."""
        if self.val_loader is None:
            raise UserError("validate: there is no val_dataset")
        model = self.model.eval()
        forward = self._step().forward
        sums: dict[str, float] = {}
        rows = 0
        with torch.no_grad():
            for batch in self.val_loader:
                outputs = forward(*(batch[name] for name in KINDS))
                loss = self.compute_loss(outputs, batch)
                total, parts = loss if isinstance(loss, tuple) else (loss, {})
                pair = outputs["predicted_fmri"], batch["fmri"]
                values = {**parts, "total_loss": total, "fmri_correlation": compute_correlation_metric(*pair).mean()}
                values["fmri_r2"] = compute_r2_score(*pair).mean()
                for name, value in values.items():
                    sums[name] = sums.get(name, 0.0) + float(value) * len(batch["fmri"])
                rows += len(batch["fmri"])
        model.train()
        return {name: value / max(1, rows) for name, value in sums.items()}

    def _train_epoch(self, epoch: int | None = None) -> dict[str, float]:
        return self.train_epoch(epoch)

    def _validate(self, epoch: int | None = None) -> dict[str, float]:
        return self.validate()

    def _step_parts(self) -> tuple:
        self._draw_weights()
        return self._model, self.criterion, self._optimizer, self.scheduler

    def _new_step(self) -> StepOrTorch:
        lowered = self.config.use_mixed_precision and jax.default_backend() != "cpu"
        step = StepOrTorch(
            self._model,
            lambda module, batch: self.compute_loss(module(*(batch[name] for name in KINDS)), batch),
            self._optimizer,
            self.scheduler,
            clip_norm=self.config.gradient_clip_val or None,
            precision="bf16" if lowered else "fp32",
            shard=self.settings.shard.model_dump(),
            say=self._say,
        )
        if step.compiled is not None:
            step.compiled.count = self.global_step  # a resumed run draws the dropout of an uninterrupted one
        return step

    def _draw_weights(self) -> None:
        """Draw the weights of a model on the meta device."""
        if self._is_on_meta():
            self._load_weights(trainer_setup.drawn_weights(self._model), "Trainer")

    def _load_weights(self, state: Mapping[str, Any], source: Any) -> None:
        meta = self._is_on_meta()
        trainer_setup.load_weights(self._model, state, source)
        if meta:  # its parameters are new objects
            self._optimizer.param_groups[0]["params"] = list(self._model.parameters())

    # --- files and lines ----------------------------------------------------------------------------------------

    def checkpoint(self, epoch: int, val_loss: float | None = None) -> dict[str, Any]:
        """Return the original's checkpoint: plain values and tensors, which torch.load(weights_only=True) accepts."""
        content = {
            "epoch": epoch,
            "global_step": self.global_step,
            "model_state_dict": self.model.state_dict(),
            "optimizer_state_dict": self.optimizer.state_dict(),
            "best_val_loss": self.best_val_loss,
            "config": dataclasses.asdict(self.config),
            "train_history": self.train_history,
            "val_history": self.val_history,
        }
        for name in ("scheduler", "scaler"):
            if getattr(self, name) is not None:
                content[f"{name}_state_dict"] = getattr(self, name).state_dict()
        return content if val_loss is None else {**content, "val_loss": val_loss}

    def save_checkpoint(
        self,
        epoch: int | str | pathlib.Path,
        val_loss: float | None = None,
        is_final: bool = False,
        *,
        is_best: bool | None = None,
    ) -> pathlib.Path:
        """Write checkpoint_epoch_<epoch>.pt, or final_checkpoint.pt, and best_checkpoint.pt if it is the best.

        epoch: counted from 0; or a path to write the present epoch to. is_best: if left out, val_loss <= best_val_loss
        decides. Returns the file's path.
        """
        best = val_loss is not None and val_loss <= self.best_val_loss if is_best is None else is_best
        name = "final_checkpoint.pt" if is_final else f"checkpoint_epoch_{epoch}.pt"
        if not isinstance(epoch, int):
            name, epoch = str(pathlib.Path(epoch).absolute()), self.current_epoch
        saved = self.checkpoint(epoch, val_loss)
        path = self._write(name, saved)
        if best:
            self._write("best_checkpoint.pt", saved)
        return path

    def _write(self, name: str, saved: Mapping[str, Any]) -> pathlib.Path:
        from torch_bridge import files

        path = files.save(saved, self.checkpoint_dir / name, follow=False)
        self._say(f"Saved checkpoint: {path}")
        return path

    def load_checkpoint(self, checkpoint_path: str | pathlib.Path) -> dict[str, Any]:
        """Load weights, moments, schedule, counters and histories from a checkpoint of this class or of the original.

        Raises UserError for any other file, and OtherModel, a RuntimeError too, for a checkpoint of another model.
        """
        path = pathlib.Path(checkpoint_path)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such checkpoint")
        saved = read_checkpoint(path)
        self._forget_step()
        self._load_weights(saved["model_state_dict"], path)
        if saved.get("optimizer_state_dict"):
            self._optimizer.load_state_dict(saved["optimizer_state_dict"])
        self.current_epoch, self.global_step = saved.get("epoch", 0), saved.get("global_step", 0)
        self.best_val_loss = saved.get("best_val_loss", float("inf"))
        for name in ("train_history", "val_history"):
            setattr(self, name, list(saved.get(name, [])))
        losses = [entry.get("total_loss", float("inf")) for entry in self.val_history]
        self._least_val_loss = min([self.best_val_loss, *(loss for loss in losses if loss == loss)])
        if self.scheduler is not None:
            self.scheduler.go_to(self.global_step)
        return saved

    _save_checkpoint, _load_checkpoint = save_checkpoint, load_checkpoint

    def log_epoch(
        self, epoch: int, train_metrics: Mapping[str, float], val_metrics: Mapping[str, float] | None
    ) -> None:
        """Write the README's line to the console and to log_dir/training.log."""
        parts = [f"Epoch {epoch + 1}/{self.config.num_epochs}", f"Train Loss: {train_metrics['total_loss']:.4f}"]
        if val_metrics is not None:
            parts.append(f"Val Loss: {val_metrics['total_loss']:.4f}")
            parts += [f"fMRI Corr: {val_metrics[n]:.4f}" for n in ("fmri_correlation",) if n in val_metrics]
        self._say(" | ".join([*parts, f"LR: {train_metrics.get('lr', 0.0):.2e}"]))

    def _say(self, text: str) -> None:
        if not self.is_main_process:
            return
        print(text, flush=True)
        self.log_dir.mkdir(parents=True, exist_ok=True)
        with open(self.log_dir / "training.log", "a", encoding="utf-8") as file:
            file.write(text + "\n")

    def _say_banner(self) -> None:
        rule, first = "=" * 80, jax.devices()[0]
        kind = {"gpu": "cuda"}.get(first.platform, first.platform)
        lines = [rule, "Starting training", rule]
        lines += [
            f"Device: {kind if kind == 'cpu' else f'{kind}:{first.id}'}",
            f"Distributed: {jax.process_count() > 1}",
        ]
        lines += [f"World size: {jax.device_count()}"]
        lines += [f"Model parameters: {sum(p.numel() for p in self._model.parameters()):,}"]
        lines += [f"Train samples: {len(self.train_dataset)}"]
        lines += [] if self.val_dataset is None else [f"Val samples: {len(self.val_dataset)}"]
        config = self.config
        fewer = "" if config.batch_size <= len(self.train_dataset) else " (one batch of all samples in training)"
        lines += [f"Batch size: {config.batch_size}{fewer}", f"Learning rate: {config.learning_rate}"]
        lines += [f"Number of epochs: {config.num_epochs}", f"Mixed precision: {config.use_mixed_precision}", rule]
        self._say("\n".join(lines))


def _device_of(model: torch.nn.Module) -> torch.device:
    return next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
