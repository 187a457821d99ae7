"""Record of a run on the host: averages, histories, best evaluation, plateau, skipped steps."""

import dataclasses
import json
import math
from typing import Any

import jax
import numpy as np

from jaxtrain.errors import UserError, file_sentence
from jaxtrain.optim.plateau import Plateau
from jaxtrain.task import needs_trust
from jaxtrain.train.checkpoint.checkpoints import Checkpoints
from jaxtrain.train.loop.cadence import Cadence
from jaxtrain.train.loop.callbacks import Callbacks
from jaxtrain.train.loop.early_stop import EarlyStopping
from jaxtrain.train.program import Program
from jaxtrain.train.step.evaluation import check_metric
from jaxtrain.train.tracking.system_metrics import SystemMetrics
from jaxtrain.train.tracking.throughput import Throughput
from jaxtrain.train.tracking.tracker import Tracker
from torch_bridge.atomic_file import write_text

MOST_OVERFLOWS = 40  # float16: most in a row; after these even the smallest useful scale has overflowed


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of the compiled step: its steps, and their metrics on the device."""

    first: int
    count: int
    metrics: jax.Array  # float32 [name], or [step, name] of several
    names: tuple[str, ...]
    stall_s: float  # total waiting time for data up to here


class NotFiniteError(UserError):
    """Loss or gradients are NaN or infinite, and train.nan_policy says to stop."""

    exit_code = 1


class RunRecord:
    """Record of every step's and every evaluation's metrics, which it also sends to the tracker. A checkpoint's
    meta.json holds all of it but the clock.

    clock, system: throughput and the machine's load; set by `start_clock`.
    """

    def __init__(self, program: Program, tracker: Tracker, checkpoints: Checkpoints, callbacks: Callbacks):
        self.program, self.tracker, self.checkpoints, self.callbacks = program, tracker, checkpoints, callbacks
        config = self.config = program.config
        self.cadence = Cadence(config, program.steps_per_epoch, program.total_steps, program.has_validation)
        evaluation, schedule = config.evaluation, config.optim.schedule
        self.best = EarlyStopping(evaluation.metric, evaluation.mode, evaluation.min_delta, evaluation.patience)
        self.plateau = None
        if schedule.name == "plateau":
            self.plateau = Plateau(
                config.optim.lr, schedule.factor, schedule.patience, schedule.threshold, schedule.mode, schedule.min_lr
            )
        self.window: list[dict[str, float]] = []  # steps since the last logged point
        self.epoch_sums: dict[str, float] = {}
        self.epoch_steps = 0
        self.train_history: list[dict[str, float]] = []
        self.val_history: list[dict[str, float]] = []
        self.best_metrics: dict[str, float] = {}
        self.last_metrics: dict[str, float] = {}
        self.skipped = self.skipped_in_a_row = self.last_skipped = 0
        self.samples_per_s = 0.0  # of the whole run, set at its end
        self.step = 0
        self.identity: str | None = None  # of the run (fingerprint.json)
        self.evaluated_step: int | None = None
        self.evaluation_due = False  # the evaluation after `step` is still to be done

    def start_clock(self, step: int, system: SystemMetrics) -> None:
        self.clock, self.system = Throughput(step, self.program.work()), system

    # --- metrics ------------------------------------------------------------------------------------------------

    def on_step_end(self, step: int, values: dict[str, float], ended: float, stall_s: float) -> None:
        """Record one finished step's metrics, in order. ended: time at which it was done. stall_s: seconds waited for
        data up to its call. Raises NotFiniteError according to `train.nan_policy`."""
        values.pop("weight")
        self.clock.add_tokens(values.pop("tokens"))
        if values.pop("skipped"):
            self._skipped(step, values)
        else:
            for name, value in values.items():
                self.epoch_sums[name] = self.epoch_sums.get(name, 0.0) + value
            self.epoch_steps += 1
            self.window.append(values)
        latest = {name: value for name, value in values.items() if name.partition("/")[0] in ("lr", "loss_scale")}
        if self.cadence.log_due(step):
            mean = lambda name: float(np.mean([v[name] for v in self.window])) if self.window else math.nan
            means = {name: mean(name) for name in values} | latest
            if self.skipped:
                means["skipped_steps"] = self.skipped
            means |= self.clock.lap(step, ended, stall_s) | self.system.read()
            self.tracker.point(step, step / self.program.steps_per_epoch, "train", means)
            self.tracker.advance(0, {"loss": means["loss"], "samples/s": means["samples_per_s"]})
            self.window = []
        if step % self.program.steps_per_epoch == 0:
            means = {name: total / max(1, self.epoch_steps) for name, total in self.epoch_sums.items()}
            self.train_history.append(means | latest)
            self.epoch_sums, self.epoch_steps = {}, 0
            if not self.cadence.has_validation:  # with it, the line of the evaluation says the training loss
                epoch = step // self.program.steps_per_epoch
                self.tracker.info(f"epoch {epoch}  step {step}  train loss {means['loss']:.4f}")

    def _skipped(self, step: int, values: dict[str, float]) -> None:
        """Record a step whose update was not applied: loss or gradients not finite, or a spike. Raises NotFiniteError
        if the run must not continue."""
        self.skipped += 1
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if step == self.last_skipped + 1 else 1
        self.last_skipped = step
        what = f"step {step}: loss {values['loss']}, gradient norm {values['grad_norm']}"
        if math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"]):
            self.tracker.warn(f"{what}: a spike, skipped ({self.skipped} skipped so far)")
        elif self._may_continue():
            scale = f", loss scale {values['loss_scale']:g}" if "loss_scale" in values else ""
            self.tracker.warn(f"{what}{scale}: skipped ({self.skipped} skipped so far)")
        else:
            indices, valid = self.program.train_loader.stream.batch(step - 1)
            path = self.config.run.folder / "not_finite.json"
            shown = {k: str(v) for k, v in values.items()}
            try:
                write_text(
                    path, json.dumps({"step": step, "indices": indices[valid].tolist(), "values": shown}, indent=1)
                )
            except OSError as error:  # the error below is what counts
                self.tracker.warn(file_sentence(error))
            newest = self.checkpoints.newest
            last = "There is no checkpoint yet" if newest is None else f"The last checkpoint is step {newest}"
            folder = self.config.run.folder
            if self.config.task is None:
                command = f"jaxtrain.debug.examine(trainer, {step}) in Python, with a trainer made anew,"
            else:
                trusting = " --trust" if needs_trust(self.config) else ""
                command = f"`jaxtrain debug --run {folder} --step {step}{trusting}`"
            raise NotFiniteError(
                f"{what}. The update was not applied; the batch's sample indices are in {path}. {last}. "
                f"{command} names the module and the line. Lower "
                "optim.lr, set optim.clip_norm, or train.nan_policy=skip, and go on with "
                f"resume={str(folder)!r} (--resume)"
            )

    def _may_continue(self) -> bool:
        """Return True if the run continues after a step that was not finite; float16 has some until its scale
        settles."""
        if self.program.precision.scaled:
            return self.skipped_in_a_row <= MOST_OVERFLOWS
        return self.config.train.nan_policy == "skip" and self.skipped <= self.config.train.max_skipped_steps

    def on_evaluation_end(self, step: int, metrics: dict[str, float]) -> bool:
        """Update best, plateau and history; return True if the result is the best so far."""
        check_metric(self.best.metric, metrics, "evaluation.metric")
        self.last_metrics, self.evaluated_step = metrics, step
        self.val_history.append(metrics)
        improved = self.best.update(metrics[self.best.metric])
        if improved:
            self.best_metrics = {**metrics, "step": step}
        if self.plateau is not None:
            watched = self.config.optim.schedule.metric
            check_metric(watched, metrics, "optim.schedule.metric")
            self.plateau.update(metrics[watched])
        epoch = step / self.program.steps_per_epoch
        self.tracker.point(step, epoch, "validation", metrics)
        train = f"train loss {self.train_history[-1]['loss']:.4f}  " if self.train_history else ""
        shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.tracker.info(f"epoch {epoch:g}  step {step}  {train}validation {shown}")
        return improved

    def lr_scale(self) -> float:
        """Return the plateau rule's factor on every learning rate."""
        return self.plateau.lr / self.config.optim.lr if self.plateau and self.config.optim.lr else 1.0

    def history(self) -> dict[str, Any]:
        """Return best_val_loss, best, best_metric, train_history and val_history, as Trainer.train does."""
        values = [metrics["loss"] for metrics in self.val_history if not math.isnan(metrics["loss"])]
        return {
            "best_val_loss": min(values, default=float("nan")),
            "best": dict(self.best_metrics),
            "best_metric": float("nan") if self.best.best is None else self.best.best,
            "train_history": self.train_history,
            "val_history": self.val_history,
        }

    def summary(self, seconds: float) -> dict[str, Any]:
        """Return the content of summary.json for a run that took `seconds`."""
        state, per_epoch = self.program.state, self.program.steps_per_epoch
        return {
            "task": self.config.task,
            "best": self.best_metrics,
            "final": self.last_metrics,
            "steps": int(state.step),
            "epochs": round(int(state.step) / per_epoch, 3),
            "seconds": round(seconds, 3),
            "throughput": {"samples_per_s": round(self.samples_per_s, 1)},
            "parameters": sum(p.size for p in state.params.values()),
            "compile": str(self.program.compile_count),
        }

    # --- checkpoints --------------------------------------------------------------------------------------------

    def meta(self, evaluated: bool | None = None) -> dict[str, Any]:
        """Return the record for a checkpoint's meta.json. evaluated: True if exactly this state was evaluated; default:
        as recorded for this step."""
        if evaluated is None:
            evaluated = self.evaluated_step == self.step
        if evaluated:
            self.evaluated_step = self.step
        return {
            "run": self.identity,
            "step": self.step,
            "metrics": self.last_metrics if evaluated else {},
            "evaluation_due": self.evaluation_due,
            "best": self.best.state(),
            "plateau": self.plateau.state() if self.plateau else None,
            "window": self.window,
            "epoch_sums": self.epoch_sums,
            "epoch_steps": self.epoch_steps,
            "train_history": self.train_history,
            "val_history": self.val_history,
            "best_metrics": self.best_metrics,
            "last_metrics": self.last_metrics,
            "skipped": self.skipped,
            "total_steps": self.program.total_steps,
            "steps_per_epoch": self.program.steps_per_epoch,
            "lr": self.config.optim.lr if self.config.optim.auto_lr else None,
            "optimizer": None if self.program.given is None else self.program.given.describe(),
            "own_schedule": self.program.has_own_schedule,
            "callbacks": self.callbacks.state_dict(),
            "stream": self.program.train_loader.places.state(self.step),
            "batch_shapes": shapes.state() if (shapes := self.program.train_loader.batch_shapes) else None,
        }

    def restore(self, meta: dict) -> None:
        """Restore the record from a checkpoint's meta.json."""
        self.evaluation_due = meta["evaluation_due"] and self.cadence.has_validation
        self.evaluated_step = meta["step"] if meta["metrics"] else None
        self.best.restore(meta["best"])
        if self.plateau is not None and meta["plateau"]:
            self.plateau.restore(meta["plateau"])
        for name in ("window", "epoch_sums", "epoch_steps", "train_history", "val_history", "skipped"):
            setattr(self, name, meta[name])
        self.best_metrics, self.last_metrics = meta["best_metrics"], meta["last_metrics"]
        self.callbacks.load_state_dict(meta.get("callbacks", ()))
        self.program.train_loader.places.restore(meta.get("stream"))
        if self.program.train_loader.batch_shapes is not None:
            self.program.train_loader.batch_shapes.restore(meta.get("batch_shapes") or (), meta["step"])
