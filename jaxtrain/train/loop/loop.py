"""Training loop: runs the compiled steps, and logs, evaluates, saves and stops when it is due."""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxtrain.data import row_keys
from jaxtrain.data.sources import describe_size
from jaxtrain.errors import UserError
from jaxtrain.runtime import host_memory
from jaxtrain.runtime.launch import wait_for_all
from jaxtrain.runtime.preemption import Interrupted, Preempted, was_saved
from jaxtrain.runtime.watchdog import Watchdog
from jaxtrain.train.checkpoint import original_files
from jaxtrain.train.checkpoint.checkpoints import Checkpoints
from jaxtrain.train.checkpoint.init_from import WarmStart
from jaxtrain.train.compilation.compiled import Compiled
from jaxtrain.train.compilation.flops import model_flops
from jaxtrain.train.compilation.padding import shape_of
from jaxtrain.train.loop.callbacks import Callbacks, Control, StepMetrics
from jaxtrain.train.loop.live_data import LiveData
from jaxtrain.train.loop.run_record import Call, RunRecord
from jaxtrain.train.program import Program
from jaxtrain.train.step.train_step import StackedMetrics
from jaxtrain.train.tracking.histograms import Histograms
from jaxtrain.train.tracking.profile.profile import Profile
from jaxtrain.train.tracking.system_metrics import SystemMetrics
from jaxtrain.train.tracking.tracker import Tracker
from jaxtrain.train.tracking.visualizations import Pictures

AfterEvaluation = Callable[[int, dict[str, float]], bool]  # (step, validation metrics) -> True ends the run


class Loop:
    """One run of the training loop over a program.

    on_save: called when a checkpoint's arrays have been copied off the device. callbacks: the user's own. control: the
    requests that they make to the run.
    """

    def __init__(
        self,
        program: Program,
        tracker: Tracker,
        checkpoints: Checkpoints,
        watchdog: Watchdog,
        on_save: Callable[[], None] = lambda: None,
        callbacks: Callbacks | None = None,
        control: Control | None = None,
    ):
        self.program, self.tracker, self.checkpoints, self.watchdog = program, tracker, checkpoints, watchdog
        self.on_save = on_save
        self.config = program.config
        self.callbacks, self.control = callbacks or Callbacks(), control or Control()
        self.record = RunRecord(program, tracker, checkpoints, self.callbacks)
        self.cadence = self.record.cadence
        self.pending: list[Call] = []
        self.drained_at = 0.0  # when the device had done all calls before the pending ones
        self.preemption = program.preemption
        self.programs: dict[tuple[int, frozenset[str]], tuple[Compiled, StackedMetrics]] = {}
        self.resting: frozenset[str] = frozenset()  # parameters that the last step did not update
        self.after_evaluation: AfterEvaluation | None = None
        program.data.expect_evaluations(self.cadence.evaluation_due)
        self.live = LiveData(program) if self.callbacks.between_epochs else None

    # --- the run ------------------------------------------------------------------------------------------------

    @host_memory.kept()
    def run(self, after_evaluation: AfterEvaluation | None = None) -> dict[str, Any]:
        """Train to the end, or save the state and raise Preempted or KeyboardInterrupt."""
        self.after_evaluation = after_evaluation
        system = SystemMetrics()
        self.record.step = int(self.program.state.step)
        program, step = self.program, self.record.step
        self.profile = Profile(self.config, self.tracker, step, program.total_steps, program.train_loader.on_device)
        with self.preemption.attached(self.config.checkpoint.grace_s, self._emergency_save, self._last_checkpoint):
            try:
                self._train(system)
            except Interrupted:
                self._save_and_exit()
            except (Preempted, KeyboardInterrupt) as error:
                if was_saved(error):  # a run started by a callback received the signal
                    self._save_and_exit()
                raise
            except Exception:
                self.checkpoints.settle()
                raise
            finally:
                self.profile.close()
        system.close()
        return self.record.history()

    def _train(self, system: SystemMetrics) -> None:
        program, record = self.program, self.record
        self._banner()
        program.announce, program.beat = self.tracker.info, lambda: self.watchdog.beat(record.step)
        for note in program.data.notes:
            self.tracker.info(note)
        for warning in program.data.warnings:
            self.tracker.warn(warning)
        self.tracker.progress(record.step, program.total_steps)
        self.hyper = program.hyper(record.lr_scale())
        self.columns = program.columns(program.train_loader)
        record.start_clock(record.step, system)
        self.pictures = Pictures(program)
        self.histograms = Histograms(program, self.config.tracking.histograms_every_steps)
        over = record.best.stop
        self.announced = self.checkpoints.newest
        self._tell("on_train_start")
        if record.evaluation_due:  # the run was preempted before this evaluation
            over = self._after(record.step)
        if not over:
            self._steps()
        self._drain()
        with record.clock.phase("checkpoint"):
            patience_s = self.config.checkpoint.retry_s
            self.checkpoints.save_for_sure(program.state, record.step, record.meta(), patience_s)
            self._write_torch(final=True)
            self._wait_for_mirror(patience_s)
        self._announce_checkpoint()
        self._tell("on_train_end")
        record.samples_per_s = record.clock.samples_per_s(record.step)

    def _steps(self) -> None:
        program, record = self.program, self.record
        log_every = self.config.train.log_every_steps
        batches = self._batches()
        while True:
            self.profile.begin(record.step, program.train_loader.stall_s, program.state)
            with self.preemption.resting(), self.watchdog.at_ease():  # data.timeout_s limits the wait for a batch
                item = next(batches, None)
            self.preemption.proceed()
            if item is None:
                return
            first, count, batch = item
            self.histograms.log(first, count, batch, self.columns, self.tracker)
            metrics, names = self._call(first, count, batch)
            record.step = first + count
            if self.pending and first // log_every > self.pending[-1].first // log_every:
                self._drain()  # one call late, so that the device never waits for the host
            self.pending.append(Call(first, count, metrics, names, program.train_loader.stall_s))
            self.watchdog.beat(record.step)
            self.tracker.advance(count)
            record.evaluation_due = self.cadence.evaluation_due(record.step)
            self._step_callbacks(first, count, metrics, names)
            record.evaluation_due |= self._asked_to_evaluate()
            if self._after(record.step):
                return

    def _batches(self) -> Iterator[tuple[int, int, Any]]:
        """Yield the batches of the run. If callbacks may change the data between epochs, an epoch is read only after
        they have returned."""
        program, start = self.program, self.record.step
        calls = self.cadence.calls(start, epochs_apart=self.live is not None)
        if self.live is None:
            yield from program.train_loader.batches(calls)
            return
        for epoch, own in itertools.groupby(calls, lambda call: call[0] // program.steps_per_epoch):
            if self.live.follow("train", max(start, epoch * program.steps_per_epoch)):
                self.columns = program.columns(program.train_loader)
            yield from program.train_loader.batches(
                own, more=(epoch + 1) * program.steps_per_epoch < self.cadence.total
            )
            if self.preemption.due:
                return

    def _call(self, first: int, count: int, batch: Any) -> tuple[jax.Array, tuple[str, ...]]:
        """Run `count` steps in one call; return their metrics and the metrics' names."""
        program, clock = self.program, self.record.clock
        resting = program.resting(first)
        if (count, resting) not in self.programs:
            self.programs[count, resting] = program.packed_train_step(count, resting)
        if resting != self.resting:
            self._tell_resting(first, resting)
        step, packed = self.programs[count, resting]
        arguments = (program.state, batch, self.hyper, self.columns)
        is_new = not step.knows(*arguments)
        if is_new:
            self._drain()  # so that no step runs while the clock stands still
        with clock.phase("compile") if is_new else contextlib.nullcontext():
            with self.preemption.resting():
                step.prepare(*arguments)
            if is_new:
                self.preemption.proceed()  # a signal may have come during the long compilation
        program.state, metrics = step(*arguments)
        if is_new:
            jax.block_until_ready(metrics)
            self._tell_compiled(step, count, batch)
        compiled = f"the step, for batches of {shape_of(batch)}" if is_new else ""
        stall_s = program.train_loader.stall_s
        self.profile.ran(first + count, step.program(*arguments), compiled, metrics, stall_s)
        return metrics, packed.names

    def _after(self, step: int) -> bool:
        """Evaluate and save if it is due after a step. Return True if the run ends here."""
        record = self.record
        evaluated = record.evaluation_due
        if evaluated:
            self._evaluate(step)
            if record.plateau:
                self.hyper["lr_scale"] = self.program.hyper(record.lr_scale())["lr_scale"]
        self.checkpoints.poll()
        self._announce_checkpoint()
        asked = self.control.take("wants_checkpoint")
        if self.cadence.save_due(step) or evaluated or asked or self.checkpoints.retry_due:
            self.save(step, evaluated)
        if self.control.take("wants_stop"):
            self.tracker.info(f"stopped at step {step}: a callback asked for it")
            return True
        if evaluated and record.best.stop:
            best = record.best
            reached = "it was NaN in all of them" if best.best is None else f"best {best.best:.6g}"
            self.tracker.info(
                f"early stop at step {step}: {best.metric} has not improved for {best.bad} evaluations; {reached}"
            )
            return True
        return evaluated and self.after_evaluation is not None and self.after_evaluation(step, record.last_metrics)

    def _tell(self, hook: str, *arguments: Any) -> None:
        """Call a hook of the callbacks; the watchdog does not limit their time."""
        with self.watchdog.at_ease():
            self.callbacks.call(hook, *arguments)

    def _step_callbacks(self, first: int, count: int, metrics: jax.Array, names: tuple[str, ...]) -> None:
        """Call the hooks of the steps that one call has just started; only a hook that reads metrics waits for them."""
        per_epoch = self.program.steps_per_epoch
        for row in range(count):
            step = first + row + 1
            if self.callbacks.has("on_step_end"):
                self._tell("on_step_end", step, StepMetrics(metrics, names, row, count))
            if step % per_epoch == 0:
                self._tell("on_epoch_end", step // per_epoch)
        logged = self.control.take("logged")
        if logged:
            self.tracker.point(first + count, (first + count) / per_epoch, "train", logged)

    def _asked_to_evaluate(self) -> bool:
        asked = self.control.take("wants_evaluation") and self.cadence.has_validation
        if asked and self.program.data.shares_order:
            raise UserError(
                "a callback asked for an evaluation, and the training and the validation DataLoader share a generator, "
                "which each evaluation moves on in torch: give each a generator of its own"
            )
        return asked

    def _announce_checkpoint(self) -> None:
        """Call `on_checkpoint` if a checkpoint has been committed since the last time."""
        if self.checkpoints.newest is not None and self.checkpoints.newest != self.announced:
            self.announced = self.checkpoints.newest
            self._tell("on_checkpoint", self.announced, self.checkpoints.folder / str(self.announced))

    def _drain(self) -> None:
        """Wait for the pending calls, fetch their metrics, and log what is due."""
        ready, self.pending = self.pending, []
        fetched = jax.device_get([call.metrics for call in ready])
        began, self.drained_at = max(self.drained_at, self.record.clock.resumed), time.perf_counter()
        step_s = (self.drained_at - began) / max(1, sum(call.count for call in ready))
        for call, metrics in zip(ready, fetched, strict=True):
            for i, row in enumerate(metrics.reshape(call.count, -1).tolist(), start=call.first + 1):
                ended = began + (i - ready[0].first) * step_s
                self.record.on_step_end(i, dict(zip(call.names, row, strict=True)), ended, call.stall_s)

    def _evaluate(self, step: int) -> None:
        self._drain()
        clock = self.record.clock
        if self.live is not None and self.live.follow("validation"):
            self.program.forget_columns("validation")
        alone = self.watchdog.at_ease() if jax.process_count() == 1 else contextlib.nullcontext()
        with clock.phase("evaluation"), self.preemption.resting(), alone:
            metrics = self.program.evaluate()
        self.record.evaluation_due = False
        self.record.on_evaluation_end(step, metrics)
        self._tell("on_evaluation_end", step, dict(metrics))
        with clock.phase("evaluation"):
            self.pictures.log(step, self.tracker)

    # --- checkpoints --------------------------------------------------------------------------------------------

    def save(self, step: int, evaluated: bool) -> None:
        self._drain()
        record = self.record
        record.step = step
        with record.clock.phase("checkpoint"):
            self.checkpoints.save(self.program.state, step, record.meta(evaluated))
            self.on_save()
            self._write_torch(due=self.cadence.save_due(step))

    def _write_torch(self, due: bool = False, final: bool = False) -> None:
        record = self.record
        original_files.write(self.program, self.checkpoints.folder.parent, record.meta(), record.best.bad, due, final)

    def _save_and_exit(self) -> None:
        """Save after a preemption or interrupt, then raise the exception that ends the run."""
        self._drain()
        grace_s, record = self.config.checkpoint.grace_s, self.record
        self.checkpoints.save_for_sure(self.program.state, record.step, record.meta(), grace_s)
        self.checkpoints.wait_for_mirror(min(grace_s, self.preemption.left_s) / 2)
        self.tracker.info(f"{self.preemption.what}: {self._last_checkpoint()}. Start the same command again to go on")
        wait_for_all("preempted", grace_s)
        raise self.preemption.saved()

    def _emergency_save(self) -> None:
        """Save from another thread, while the main thread compiles, evaluates or waits for data."""
        self._drain()
        self.checkpoints.save(self.program.state, self.record.step, self.record.meta())
        if not self.checkpoints.wait():
            raise RuntimeError("not saved")  # the main thread may still be in time to try again
        self.tracker.close()

    def _wait_for_mirror(self, patience_s: float) -> None:
        """Wait for the mirror: without limit in a single process, else up to `patience_s`; a signal ends the wait."""

        def give_up() -> bool:
            self.watchdog.beat(self.record.step)
            return self.preemption.told.is_set()

        self.checkpoints.wait_for_mirror(float("inf") if jax.process_count() == 1 else patience_s, give_up)

    def _last_checkpoint(self) -> str:
        step = self.checkpoints.newest
        return "no checkpoint was saved yet" if step is None else f"the checkpoint of step {step} is saved"

    def start_from(self, origin: WarmStart) -> None:
        """Start from what `init_from` has loaded: log its lines, and restore the plateau rule's state."""
        for line in origin.lines:
            self.tracker.info(line)
        if self.record.plateau is not None and origin.plateau is not None:
            self.record.plateau.restore(dict(origin.plateau))

    # --- log lines ----------------------------------------------------------------------------------------------

    def _banner(self) -> None:
        program = self.program
        trained = sum(p.size for p in program.state.params.values())
        fixed = sum(p.size for p in program.state.frozen.values())
        device = f"{program.layout.mesh.size} x {jax.devices()[0].device_kind}"
        self.tracker.info(
            f"{self.config.task or 'model'}: {trained:,} parameters"
            + (f" and {fixed:,} frozen" if fixed else "")
            + f", {describe_size(program.data.source('train'))} samples, "
            f"{program.total_steps - self.record.step:,} steps of {self.config.data.batch_size} on {device} "
            f"({program.layout.strategy}, {self.config.precision.policy})"
        )

    def _tell_resting(self, step: int, resting: frozenset[str]) -> None:
        groups = self.program.optimizer.groups
        names = lambda keys: ", ".join(sorted({groups[key] for key in keys}))
        lines = [f"{names(resting - self.resting)} does not train"] if resting - self.resting else []
        lines += [f"{names(self.resting - resting)} trains"] if self.resting - resting else []
        epoch = step / self.program.steps_per_epoch
        self.tracker.info(f"from epoch {epoch:g} on {' and '.join(lines)}; the step is compiled for that")
        self.resting = resting

    def _tell_compiled(self, step: Compiled, count: int, batch: Any) -> None:
        clock = self.record.clock
        parts = batch if isinstance(batch, tuple) else (batch,)
        rows = sum(row_keys.valid(part)[0].size if count > 1 else row_keys.valid(part).size for part in parts)
        again = len(step.programs) > 1 and self.program.train_loader.batch_shapes is not None
        if again or rows < self.config.data.batch_size:
            self.tracker.info(f"compiled once more, for batches of {shape_of(batch)}: {step.last_s:.1f} s")
            return
        if clock.work.flops is None and step.flops:
            flops = model_flops(step.flops, self.config.train.remat) / count
            clock.work = dataclasses.replace(clock.work, flops=flops)
        self.tracker.info(f"compiled: {self.program.compile_count}; the step alone {step.seconds:.1f} s")
