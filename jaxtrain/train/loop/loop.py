"""The loop: it owns cadence (when to log, evaluate, save, stop) and nothing else."""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxtrain.data.sources import describe_size
from jaxtrain.errors import UserError
from jaxtrain.optim.plateau import Plateau
from jaxtrain.runtime import host_memory
from jaxtrain.runtime.launch import wait_for_all
from jaxtrain.runtime.preemption import Interrupted
from jaxtrain.runtime.watchdog import Watchdog
from jaxtrain.train.checkpoint.checkpoints import Checkpoints
from jaxtrain.train.compilation.compiled import Compiled
from jaxtrain.train.loop.early_stop import EarlyStopping
from jaxtrain.train.step.train_step import StackedMetrics
from jaxtrain.train.tracking.histograms import Histograms
from jaxtrain.train.tracking.system_metrics import SystemMetrics
from jaxtrain.train.tracking.throughput import Throughput
from jaxtrain.train.tracking.tracker import Tracker
from jaxtrain.train.tracking.visualizations import Pictures

if TYPE_CHECKING:
    from jaxtrain.train.checkpoint.init_from import WarmStart
    from jaxtrain.train.trainer import Trainer

AfterEvaluation = Callable[[int, dict[str, float]], bool]  # (step, validation metrics) -> True ends the run
MOST_PROGRAMS = 4  # different numbers of steps per call, each compiled
MOST_OVERFLOWS = 40  # float16: in a row; by then even the smallest useful scale overflows


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
        self.best = EarlyStopping(evaluation.metric, evaluation.mode, evaluation.min_delta, evaluation.patience)
        schedule = config.optim.schedule
        self.plateau = None
        if schedule.name == "plateau":
            self.plateau = Plateau(
                config.optim.lr, schedule.factor, schedule.patience, schedule.threshold, schedule.mode, schedule.min_lr
            )
        self.pending: list[Call] = []
        self.window: list[dict[str, float]] = []  # steps since the last logged point
        self.epoch_sums: dict[str, float] = {}
        self.epoch_steps = 0
        self.train_history: list[dict[str, float]] = []
        self.val_history: list[dict[str, float]] = []
        self.best_metrics: dict[str, float] = {}
        self.last_metrics: dict[str, float] = {}
        self.skipped = self.skipped_in_a_row = self.last_skipped = 0
        self.samples_per_s = 0.0
        self.step = 0
        self.evaluated_step: int | None = None
        self.evaluation_due = False  # after `step`, and not done yet
        self.preemption = trainer.preemption
        self.programs: dict[int, tuple[Compiled, StackedMetrics]] = {}
        self.after_evaluation: AfterEvaluation | None = None

    # --- the run ------------------------------------------------------------------------------------------------

    @host_memory.kept()
    def run(self, after_evaluation: AfterEvaluation | None = None) -> dict[str, Any]:
        """To the end, or to a preemption: then the state is saved and Preempted is raised."""
        self.after_evaluation = after_evaluation
        self.system = SystemMetrics()
        config = self.config.checkpoint
        self.step = int(self.trainer.state.step)
        with self.preemption.attached(config.grace_s, self._emergency_save, self._last_checkpoint):
            try:
                self._train()
            except Interrupted:
                self._save_and_exit()
        self.system.close()
        return self.history()

    def _train(self) -> None:
        trainer, total = self.trainer, self.trainer.total_steps
        self._banner()
        self.tracker.progress(self.step, total)
        self.hyper = trainer.hyper(self.lr_scale())
        self.columns = trainer.columns(trainer.train_loader)
        self.clock = Throughput(self.step, trainer.work())
        self.pictures = Pictures(trainer)
        self.histograms = Histograms(trainer, self.config.tracking.histograms_every_steps)
        over = self.best.stop
        if self.evaluation_due:  # a preemption came before it
            over = self._after(self.step)
        if not over:
            self._steps()
        self._drain()
        with self.clock.phase("checkpoint"):
            self.checkpoints.save_for_sure(trainer.state, self.step, self.meta(), self.config.checkpoint.retry_s)
        self.samples_per_s = self.clock.samples_per_s(self.step)

    def _steps(self) -> None:
        trainer, total = self.trainer, self.trainer.total_steps
        batches = trainer.train_loader.batches(self.calls(self.step, total))
        while True:
            began = time.perf_counter()
            with self.preemption.resting():
                item = next(batches, None)
            self.preemption.proceed()
            if item is None:
                return
            first, count, batch = item
            self.histograms.log(first, count, batch, self.columns, self.tracker)
            metrics, names = self._call(count, batch)
            self.step = first + count
            stall_s = trainer.train_loader.stall_s
            self.pending.append(Call(first, count, metrics, names, began, time.perf_counter(), stall_s))
            self.watchdog.beat(self.step)
            if (self.step // self.config.train.log_every_steps) > (first // self.config.train.log_every_steps):
                self._drain(keep=1)  # a call late, so that the device never waits for the host
            self.tracker.advance(count)
            self.evaluation_due = self.due(self.step, self.evaluate_every, total) and self.has_validation
            if self._after(self.step):
                return

    def _call(self, count: int, batch: Any) -> tuple[jax.Array, tuple[str, ...]]:
        """So many steps in one call: their metrics, and what those are called."""
        trainer = self.trainer
        is_new = count not in self.programs
        if is_new:
            self.programs[count] = trainer.packed_train_step(count)
        program, packed = self.programs[count]
        arguments = (trainer.state, batch, self.hyper, self.columns)
        with self.clock.phase("compile") if is_new else contextlib.nullcontext():
            with self.preemption.resting():
                program.prepare(*arguments)
            if is_new:
                self.preemption.proceed()  # compiling takes long enough to be preempted over
            trainer.state, metrics = program(*arguments)
            if is_new:
                jax.block_until_ready(metrics)
                self._say_compiled(program, count)
        return metrics, packed.names

    def _after(self, step: int) -> bool:
        """What is due after a step: an evaluation, a checkpoint. Whether the run is over because of it."""
        evaluated = self.evaluation_due
        if evaluated:
            self._evaluate(step)
            if self.plateau:
                self.hyper["lr_scale"] = self.trainer.hyper(self.lr_scale())["lr_scale"]
        self.checkpoints.poll()
        total = self.trainer.total_steps
        if self.due(step, self.save_every, total) or evaluated or step == total or self.checkpoints.retry_due:
            self.save(step, evaluated)
        if evaluated and self.best.stop:
            self.tracker.info(
                f"early stop at step {step}: {self.best.metric} has not improved for {self.best.bad} evaluations; best "
                f"{self.best.best:.6g}"
            )
            return True
        return evaluated and self.after_evaluation is not None and self.after_evaluation(step, self.last_metrics)

    def history(self) -> dict[str, Any]:
        values = [metrics["loss"] for metrics in self.val_history if not math.isnan(metrics["loss"])]
        return {
            "best_val_loss": min(values, default=float("nan")),
            "train_history": self.train_history,
            "val_history": self.val_history,
        }

    def calls(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Steps in calls of up to `steps_per_call`, cut where something is due in between: in equal parts where one
        program does that, else a rest is a call too, as long as that takes few different programs."""
        every = [self.evaluate_every, self.save_every, self.config.tracking.histograms_every_steps]
        step, most = start, _even(self.config.train.steps_per_call, [n for n in (*every, start, stop) if n])
        sizes = {most}
        while step < stop:
            boundary = min([stop, *((step // n + 1) * n for n in every if n)])
            count = min(most, boundary - step)
            if count not in sizes and len(sizes) >= MOST_PROGRAMS:
                count = 1
            sizes.add(count)
            yield step, count
            step += count

    @staticmethod
    def due(step: int, every: int | None, total: int) -> bool:
        return every is not None and (step % every == 0 or step == total)

    # --- metrics ------------------------------------------------------------------------------------------------

    def _drain(self, keep: int = 0) -> None:
        """Fetch the metrics of finished calls, all but the last `keep`, and log what is due."""
        ready = self.pending[: len(self.pending) - keep]
        self.pending = self.pending[len(ready) :]
        for call, metrics in zip(ready, jax.device_get([call.metrics for call in ready]), strict=True):
            for i, row in enumerate(metrics.reshape(call.count, -1).tolist()):
                self.on_step_end(call.first + i + 1, dict(zip(call.names, row, strict=True)), call)

    def on_step_end(self, step: int, values: dict[str, float], call: "Call") -> None:
        """One finished step's metrics, in order."""
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
        if step % self.config.train.log_every_steps == 0 or step == self.trainer.total_steps:
            mean = lambda name: float(np.mean([v[name] for v in self.window])) if self.window else math.nan
            means = {name: mean(name) for name in values} | latest
            if self.skipped:
                means["skipped_steps"] = self.skipped
            means |= self.clock.lap(step, call.time_of(step), call.stall_s) | self.system.read()
            self.tracker.point(step, step / self.trainer.steps_per_epoch, "train", means)
            self.tracker.advance(0, {"loss": means["loss"], "samples/s": means["samples_per_s"]})
            self.window = []
        if step % self.trainer.steps_per_epoch == 0:
            means = {name: total / max(1, self.epoch_steps) for name, total in self.epoch_sums.items()}
            self.train_history.append(means | latest)
            self.epoch_sums, self.epoch_steps = {}, 0

    def _skipped(self, step: int, values: dict[str, float]) -> None:
        """A step whose update was not applied: loss or gradients not finite, or a spike."""
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
            indices, valid = self.trainer.train_loader.stream.batch(step - 1)
            path = self.trainer.folder / "not_finite.json"
            shown = {k: str(v) for k, v in values.items()}
            path.write_text(json.dumps({"step": step, "indices": indices[valid].tolist(), "values": shown}, indent=1))
            newest = self.checkpoints.newest
            last = "There is no checkpoint yet" if newest is None else f"The last checkpoint is step {newest}"
            raise NotFiniteError(
                f"{what}. The update was not applied; the batch's sample indices are in {path}. {last}. "
                "Lower optim.lr, set optim.clip_norm, or train.nan_policy=skip"
            )

    def _may_continue(self) -> bool:
        """Whether the run goes on after a step that was not finite: float16 expects some, while its scale settles."""
        if self.trainer.precision.scaled:
            return self.skipped_in_a_row <= MOST_OVERFLOWS
        return self.config.train.nan_policy == "skip" and self.skipped <= self.config.train.max_skipped_steps

    def _evaluate(self, step: int) -> None:
        self._drain()
        with self.clock.phase("evaluation"), self.preemption.resting():
            metrics = self.trainer.evaluate()
        self.evaluation_due = False
        self.on_evaluation_end(step, metrics)
        with self.clock.phase("evaluation"):
            self.pictures.log(step, self.tracker)

    def on_evaluation_end(self, step: int, metrics: dict[str, float]) -> bool:
        """What an evaluation's metrics change: best, plateau, the record. Whether they are the best so far."""
        if self.best.metric not in metrics:
            raise UserError(f"evaluation.metric: {self.best.metric} is unknown; this task has {', '.join(metrics)}")
        self.last_metrics = metrics
        self.val_history.append(metrics)
        improved = self.best.update(metrics[self.best.metric])
        if improved:
            self.best_metrics = {**metrics, "step": step}
        if self.plateau is not None:
            watched = self.config.optim.schedule.metric
            if watched not in metrics:
                raise UserError(f"optim.schedule.metric: {watched} is unknown; this task has {', '.join(metrics)}")
            self.plateau.update(metrics[watched])
        epoch = step / self.trainer.steps_per_epoch
        self.tracker.point(step, epoch, "validation", metrics)
        train = f"train loss {self.train_history[-1]['loss']:.4f}  " if self.train_history else ""
        shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.tracker.info(f"epoch {epoch:g}  step {step}  {train}validation {shown}")
        return improved

    def lr_scale(self) -> float:
        return self.plateau.lr / self.config.optim.lr if self.plateau and self.config.optim.lr else 1.0

    # --- checkpoints --------------------------------------------------------------------------------------------

    def save(self, step: int, evaluated: bool) -> None:
        self._drain()
        self.step = step
        with self.clock.phase("checkpoint"):
            self.checkpoints.save(self.trainer.state, step, self.meta(evaluated))
            if self.config.checkpoint.write_back:
                self.trainer.write_back()

    def meta(self, evaluated: bool | None = None) -> dict[str, Any]:
        """What the host knows. evaluated: whether this very state was; if left out, as its checkpoint says."""
        if evaluated is None:
            evaluated = self.evaluated_step == self.step
        if evaluated:
            self.evaluated_step = self.step
        return {
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
            "total_steps": self.trainer.total_steps,
            "steps_per_epoch": self.trainer.steps_per_epoch,
        }

    def _save_and_exit(self) -> None:
        """Preempted or interrupted: save, and end."""
        self._drain()
        grace_s = self.config.checkpoint.grace_s
        self.checkpoints.save_for_sure(self.trainer.state, self.step, self.meta(), grace_s)
        self.tracker.info(f"{self.preemption.what}: {self._last_checkpoint()}. Start the same command again to go on")
        wait_for_all("preempted", grace_s)
        raise self.preemption.saved()

    def _emergency_save(self) -> None:
        """The same from another thread, while this one compiles, evaluates or waits for data."""
        self._drain()
        self.checkpoints.save(self.trainer.state, self.step, self.meta())
        if not self.checkpoints.wait():
            raise RuntimeError("not saved")  # the main thread may come in time for another try
        self.tracker.close()

    def _last_checkpoint(self) -> str:
        step = self.checkpoints.newest
        return "no checkpoint was saved yet" if step is None else f"the checkpoint of step {step} is saved"

    def restore(self, meta: dict) -> None:
        """Go on from what a checkpoint's meta.json holds."""
        self.evaluation_due = meta["evaluation_due"] and self.has_validation
        self.evaluated_step = meta["step"] if meta["metrics"] else None
        self.best.restore(meta["best"])
        if self.plateau is not None and meta["plateau"]:
            self.plateau.restore(meta["plateau"])
        for name in ("window", "epoch_sums", "epoch_steps", "train_history", "val_history", "skipped"):
            setattr(self, name, meta[name])
        self.best_metrics, self.last_metrics = meta["best_metrics"], meta["last_metrics"]

    def start_from(self, origin: "WarmStart") -> None:
        """Go on from what `init_from` brought."""
        for line in origin.lines:
            self.tracker.info(line)
        if self.plateau is not None and origin.plateau is not None:
            self.plateau.restore(dict(origin.plateau))

    # --- words --------------------------------------------------------------------------------------------------

    def _banner(self) -> None:
        trainer = self.trainer
        trained = sum(p.size for p in trainer.state.params.values())
        fixed = sum(p.size for p in trainer.state.frozen.values())
        device = f"{trainer.layout.mesh.size} x {jax.devices()[0].device_kind}"
        self.tracker.info(
            f"{self.config.task or 'model'}: {trained:,} parameters"
            + (f" and {fixed:,} frozen" if fixed else "")
            + f", {describe_size(trainer.source('train'))} samples, {trainer.total_steps - self.step:,} steps of "
            f"{self.config.data.batch_size} on {device} ({trainer.layout.strategy}, {self.config.precision.policy})"
        )

    def _say_compiled(self, program: Any, count: int) -> None:
        work = self.clock.work
        if work.flops is None and program.flops:
            self.clock.work = dataclasses.replace(work, flops=self.trainer.model_flops(program.flops) / count)
        self.tracker.info(f"compiled: {self.trainer.compile_count}; the step alone {program.seconds:.1f} s")


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of the compiled step: what it runs, its metrics on the device, its time on the host."""

    first: int
    count: int
    metrics: jax.Array  # float32 [name], or [step, name] of several
    names: tuple[str, ...]
    began: float
    ended: float
    stall_s: float  # of the whole run up to here

    def time_of(self, step: int) -> float:
        """When `step` (1-based) was about done."""
        return self.began + (self.ended - self.began) * (step - self.first) / self.count


class NotFiniteError(UserError):
    """Training met NaN or infinity and the policy is to stop."""

    exit_code = 1


def _even(most: int, boundaries: list[int]) -> int:
    """The largest number of steps that divides all boundaries, where that is more than half of `most`; else `most`."""
    common = math.gcd(*boundaries)
    divisors = [n for n in range(most // 2 + 1, most + 1) if common % n == 0]
    return max(divisors, default=most)


def _cadence(every_steps: int | None, every_epochs: int | None, steps_per_epoch: int) -> int | None:
    return every_steps or (every_epochs * steps_per_epoch if every_epochs else None)
