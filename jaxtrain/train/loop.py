"""The loop: it owns cadence (when to log, evaluate, save, stop) and nothing else."""

import json
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.optim.plateau import Plateau
from jaxtrain.runtime.watchdog import Watchdog
from jaxtrain.train.checkpoint import Checkpoints
from jaxtrain.train.early_stop import Best
from jaxtrain.train.tracking import Tracker

if TYPE_CHECKING:
    from jaxtrain.train.trainer import Trainer


class Loop:
    """One run of the training loop over an assembled Trainer."""

    def __init__(self, trainer: "Trainer", tracker: Tracker, checkpoints: Checkpoints, watchdog: Watchdog):
        self.trainer, self.tracker, self.checkpoints, self.watchdog = trainer, tracker, checkpoints, watchdog
        config = self.config = trainer.config
        spe = trainer.steps_per_epoch
        evaluation, saving = config.evaluation, config.checkpoint
        self.evaluate_every = _cadence(evaluation.every_steps, evaluation.every_epochs, spe)
        self.save_every = _cadence(saving.every_steps, saving.every_epochs, spe)
        self.has_validation = trainer.source("validation") is not None
        self.best = Best(evaluation.metric, evaluation.mode, evaluation.min_delta, evaluation.patience)
        schedule = config.optim.schedule
        self.plateau = None
        if schedule.name == "plateau":
            self.plateau = Plateau(
                config.optim.lr, schedule.factor, schedule.patience, schedule.threshold, schedule.mode, schedule.min_lr
            )
        self.pending: list[tuple[int, int, Any]] = []  # (first step, count, metrics on the device)
        self.window: list[dict[str, float]] = []  # steps since the last logged point
        self.epoch_sums: dict[str, float] = {}
        self.epoch_steps = 0
        self.train_history: list[dict[str, float]] = []
        self.val_history: list[dict[str, float]] = []
        self.best_metrics: dict[str, float] = {}
        self.last_metrics: dict[str, float] = {}
        self.skipped = 0
        self.samples_per_s = 0.0

    # --- the run ------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        trainer, total = self.trainer, self.trainer.total_steps
        start = int(trainer.state.step)
        self._banner(start)
        self.tracker.progress(start, total)
        hyper = trainer.hyper(self._lr_scale())
        columns = trainer.columns(trainer.train_loader)
        programs = {count: trainer.train_step(count) for count in {1, self.config.train.steps_per_call}}
        self.clock = _Clock(start)
        step = start
        for first, count, batch in trainer.train_loader.batches(self._calls(start, total)):
            trainer.state, metrics = programs[count](trainer.state, batch, hyper, columns)
            if first == start:
                self._say_compiled(programs[count], metrics)
            step = first + count
            self.pending.append((first, count, metrics))
            self.watchdog.beat(step)
            if (step // self.config.train.log_every_steps) > (first // self.config.train.log_every_steps):
                self._drain(keep=1)  # a call late, so that the device never waits for the host
            self.tracker.advance(count)
            evaluated = self._due(step, self.evaluate_every, total) and self.has_validation
            if evaluated:
                self._evaluate(step)
                hyper["lr_scale"] = trainer.hyper(self._lr_scale())["lr_scale"] if self.plateau else hyper["lr_scale"]
            if self._due(step, self.save_every, total) or evaluated or step == total:
                self._save(step, evaluated)
            self.checkpoints.poll()
            if evaluated and self.best.stop:
                self.tracker.say(
                    f"early stop at step {step}: {self.best.metric} has not improved for {self.best.bad} evaluations; "
                    f"best {self.best.best:.6g}"
                )
                break
        self._drain()
        if step > start and self.checkpoints.newest != step:
            self._save(step, evaluated=False)
        self.checkpoints.wait()
        self.samples_per_s = self.clock.overall(step, self.config.data.batch_size)
        return self.history()

    def history(self) -> dict[str, Any]:
        values = [metrics["loss"] for metrics in self.val_history if not math.isnan(metrics["loss"])]
        return {
            "best_val_loss": min(values, default=float("nan")),
            "train_history": self.train_history,
            "val_history": self.val_history,
        }

    def _calls(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Steps in calls of `steps_per_call`, cut where something is due in between."""
        step, most = start, self.config.train.steps_per_call
        every = [n for n in (self.evaluate_every, self.save_every, self.trainer.steps_per_epoch) if n]
        while step < stop:
            boundary = min([stop, *((step // n + 1) * n for n in every)])
            count = most if boundary - step >= most else 1
            yield step, count
            step += count

    @staticmethod
    def _due(step: int, every: int | None, total: int) -> bool:
        return every is not None and (step % every == 0 or step == total)

    # --- metrics ------------------------------------------------------------------------------------------------

    def _drain(self, keep: int = 0) -> None:
        """Fetch the metrics of finished calls, all but the last `keep`, and log what is due."""
        ready = self.pending[: len(self.pending) - keep]
        self.pending = self.pending[len(ready) :]
        for (first, count, _), metrics in zip(ready, jax.device_get([m for _, _, m in ready]), strict=True):
            for i in range(count):
                values = {name: float(np.asarray(v)[i] if count > 1 else v) for name, v in metrics.items()}
                self._take(first + i + 1, values)

    def _take(self, step: int, values: dict[str, float]) -> None:
        """One finished step's metrics, in order."""
        values.pop("weight")
        if values.pop("skipped"):
            self._skipped(step, values)
        for name, value in values.items():
            self.epoch_sums[name] = self.epoch_sums.get(name, 0.0) + value
        self.epoch_steps += 1
        self.window.append(values)
        if step % self.config.train.log_every_steps == 0 or step == self.trainer.total_steps:
            means = {name: float(np.mean([v[name] for v in self.window])) for name in values}
            means["lr"] = self._lr(step - 1)
            means |= self.clock.lap(step, self.config.data.batch_size, self.trainer.train_loader)
            self.tracker.point(step, step / self.trainer.steps_per_epoch, "train", means)
            self.tracker.advance(0, {"loss": means["loss"], "samples/s": means["samples_per_s"]})
            self.window = []
        if step % self.trainer.steps_per_epoch == 0:
            means = {name: total / self.epoch_steps for name, total in self.epoch_sums.items()}
            self.train_history.append({**means, "lr": self._lr(step - 1)})
            self.epoch_sums, self.epoch_steps = {}, 0

    def _skipped(self, step: int, values: dict[str, float]) -> None:
        """A step whose loss or gradients were not finite; its update was not applied."""
        self.skipped += 1
        policy = "scale" if self.trainer.precision.scaled else self.config.train.nan_policy
        what = f"step {step}: loss {values['loss']}, gradient norm {values['grad_norm']}"
        if policy in ("stop", "skip") and (policy == "stop" or self.skipped > self.config.train.max_skipped_steps):
            indices, valid = self.trainer.train_loader.stream.batch(step - 1)
            path = self.trainer.folder / "not_finite.json"
            shown = {k: str(v) for k, v in values.items()}
            path.write_text(json.dumps({"step": step, "indices": indices[valid].tolist(), "values": shown}, indent=1))
            raise NotFiniteError(
                f"{what}. The update was not applied; the batch's sample indices are in {path}. The last checkpoint is "
                f"step {self.checkpoints.latest()}. Lower optim.lr, set optim.clip_norm, or train.nan_policy=skip"
            )
        self.tracker.warn(f"{what}: skipped ({self.skipped} so far)")

    def _evaluate(self, step: int) -> None:
        self._drain()
        metrics = self.trainer.evaluate()
        if self.best.metric not in metrics:
            raise UserError(f"evaluation.metric: {self.best.metric} is unknown; this task has {', '.join(metrics)}")
        self.last_metrics = metrics
        self.val_history.append(metrics)
        if self.best.update(metrics[self.best.metric]):
            self.best_metrics = {**metrics, "step": step}
        if self.plateau is not None:
            self.plateau.update(metrics[self.config.optim.schedule.metric])
        epoch = step / self.trainer.steps_per_epoch
        self.tracker.point(step, epoch, "validation", metrics)
        train = f"train loss {self.train_history[-1]['loss']:.4f}  " if self.train_history else ""
        shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.tracker.say(f"epoch {epoch:g}  step {step}  {train}validation {shown}")
        self.clock.pause()

    def _lr(self, step: int) -> float:
        factor = self.trainer.schedule(max(0, step - self.skipped))
        return float(self.config.optim.lr * factor * self._lr_scale())

    def _lr_scale(self) -> float:
        return self.plateau.lr / self.config.optim.lr if self.plateau and self.config.optim.lr else 1.0

    # --- checkpoints --------------------------------------------------------------------------------------------

    def _save(self, step: int, evaluated: bool) -> None:
        self._drain()
        meta = {
            "step": step,
            "metrics": self.last_metrics if evaluated else {},
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
        }
        self.checkpoints.save(self.trainer.state, step, meta)

    def restore(self, meta: dict) -> None:
        """Go on from what a checkpoint's meta.json holds."""
        self.best.restore(meta["best"])
        if self.plateau is not None and meta["plateau"]:
            self.plateau.restore(meta["plateau"])
        for name in ("window", "epoch_sums", "epoch_steps", "train_history", "val_history", "skipped"):
            setattr(self, name, meta[name])
        self.best_metrics, self.last_metrics = meta["best_metrics"], meta["last_metrics"]

    # --- words --------------------------------------------------------------------------------------------------

    def _banner(self, start: int) -> None:
        trainer = self.trainer
        trained = sum(p.size for p in trainer.state.params.values())
        fixed = sum(p.size for p in trainer.state.frozen.values())
        device = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
        self.tracker.say(
            f"{self.config.task or 'model'}: {trained:,} parameters"
            + (f" and {fixed:,} frozen" if fixed else "")
            + f", {len(trainer.source('train')):,} samples, {trainer.total_steps - start:,} steps of "
            f"{self.config.data.batch_size} on {device} ({trainer.layout.strategy}, {self.config.precision.policy})"
        )

    def _say_compiled(self, program, metrics) -> None:
        jax.block_until_ready(metrics)
        self.tracker.say(f"compiled: {self.trainer.compile_count}; the step alone {program.seconds:.1f} s")
        self.clock = _Clock(int(self.trainer.state.step))


class NotFiniteError(RuntimeError):
    """Training met NaN or infinity and the policy is to stop."""


class _Clock:
    """Throughput and input stall between two logged points."""

    def __init__(self, step: int):
        self.first = self.step = step
        self.began = self.time = time.perf_counter()
        self.paused = 0.0
        self.stall = 0.0

    def lap(self, step: int, batch_size: int, loader) -> dict[str, float]:
        now = time.perf_counter()
        elapsed, steps = max(now - self.time, 1e-9), step - self.step
        stall = max(0.0, loader.stall_s - self.stall)
        self.time, self.step, self.stall = now, step, loader.stall_s
        return {"samples_per_s": steps * batch_size / elapsed, "input_stall_ratio": min(1.0, stall / elapsed)}

    def pause(self) -> None:
        """What passed since the last lap was not training."""
        now = time.perf_counter()
        self.paused += now - self.time
        self.time = now

    def overall(self, step: int, batch_size: int) -> float:
        elapsed = time.perf_counter() - self.began - self.paused
        return (step - self.first) * batch_size / max(elapsed, 1e-9)


def _cadence(every_steps: int | None, every_epochs: int | None, steps_per_epoch: int) -> int | None:
    return every_steps or (every_epochs * steps_per_epoch if every_epochs else None)
