"""One run in its folder: a training loop with tracker and watchdog, started or resumed from the right weights."""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxtrain.errors import UserError
from jaxtrain.runtime.launch import broadcast_from_process_zero
from jaxtrain.runtime.preemption import Preempted, was_saved
from jaxtrain.runtime.watchdog import Watchdog
from jaxtrain.train import run_dir
from jaxtrain.train.checkpoint import best, original_files, recorded_model
from jaxtrain.train.checkpoint.checkpoints import Checkpoints
from jaxtrain.train.checkpoint.init_from import WarmStart
from jaxtrain.train.checkpoint.mirror import Mirror
from jaxtrain.train.loop.callbacks import Callbacks, Control
from jaxtrain.train.loop.loop import AfterEvaluation, Loop
from jaxtrain.train.program import Program
from jaxtrain.train.resume import origin
from jaxtrain.train.resume.fingerprint import Fingerprint
from jaxtrain.train.search import lr_range
from jaxtrain.train.tracking.tracker import Tracker


@dataclasses.dataclass
class Session:
    """A run of a program, in a run folder that the caller has locked.

    fingerprint: of this run. resume: "auto", "never", "here" or another run's folder, as in origin.find. callbacks: the
    user's own. control: requests that they make to the run. write_back: writes the weights into the user's own model;
    called with each checkpoint if `checkpoint.write_back` is set.
    warm_start: loads the weights of `init_from`. exported: the file with the best weights, once written.
    """

    program: Program
    fingerprint: Fingerprint
    resume: str
    callbacks: Callbacks
    control: Control
    write_back: Callable[[], None]
    warm_start: Callable[[], WarmStart | None]
    exported: pathlib.Path | None = None
    export_failure: str = ""  # why it is None, once the run has ended

    @property
    def folder(self) -> pathlib.Path:
        return self.program.config.run.folder

    def run(self, after_evaluation: AfterEvaluation | None = None, warnings: Sequence[str] = ()) -> dict[str, Any]:
        """Log the warnings, train to the end and return the history. Errors of the run are explained and raised."""
        started = time.time()
        tracker = Tracker(self.folder, self.program.config, active=jax.process_index() == 0)
        for warning in warnings if jax.process_index() == 0 else []:
            tracker.warn(warning)
        watchdog = Watchdog(self.folder, self.program.config.train.hang_timeout_s)
        watchdog.start()
        failed = True
        try:
            loop = self._loop(tracker, watchdog)
            history = loop.run(after_evaluation)
            if jax.process_index() == 0:
                if not run_dir.is_described(self.folder):  # it was moved or deleted during the run
                    self._describe(goes_on=True)
                summary = loop.record.summary(time.time() - started)
                run_dir.write_summary(self.folder, summary, self.program.layout.mesh.size)
            self._export(loop)
            failed = False
        except (Preempted, KeyboardInterrupt) as error:
            failed = not was_saved(error)
            raise
        except Exception as error:
            self.callbacks.call("on_exception", error)
            if error is not self.callbacks.raised:
                watchdog.explain(error)
            raise
        finally:
            watchdog.stop()
            tracker.close(failed)
            self.program.data.close()
        return history

    def _export(self, loop: Loop) -> None:
        """Write the best weights as a file for torch. A failure is a warning: the run itself has ended well."""
        config = self.program.config
        if not config.checkpoint.export or config.train.fast_dev_run:
            return

        def export() -> list[str]:
            try:
                return [str(best.export(self.program, loop.checkpoints)), ""]
            except UserError as error:
                return ["", str(error)]

        path, failure = broadcast_from_process_zero(
            "export", export
        )  # only process 0 reads and writes; the others wait
        if failure:
            self.export_failure = failure
            loop.tracker.warn(f"the best weights were not exported: {failure}. `jaxtrain export` can write them later")
        else:
            self.exported = pathlib.Path(path)

    def _loop(self, tracker: Tracker, watchdog: Watchdog) -> Loop:
        """Create the loop at the step where training starts or resumes, and record the start in the run folder."""
        program = self.program
        checkpoints = run_dir.checkpoints(self.folder, program.config, tracker.warn)
        if program.config.checkpoint.mirror is not None:
            checkpoints.mirror = Mirror(program.config.checkpoint.mirror, self.folder)
        original_files.check(program)
        start, step = origin.find(program, self.fingerprint, checkpoints, self.resume)
        warm = self.warm_start() if step is None else None
        if program.config.optim.auto_lr:  # replaces program.config, so before the loop reads it
            lr_range.set_lr(program, None if step is None else start.meta(step)["lr"], tracker.info)
        config = program.config
        on_save = {"on_save": self.write_back} if config.checkpoint.write_back else {}
        loop = Loop(program, tracker, checkpoints, watchdog, **on_save, callbacks=self.callbacks, control=self.control)
        if step is not None:
            self._restore(loop, start, step)
        elif warm is not None:
            loop.start_from(warm)
        if start is not checkpoints:
            checkpoints.newest = None  # the folder holds no checkpoint of its own yet
        tracker.rewind(int(program.state.step), loop.record.evaluation_due)
        if jax.process_index() == 0:
            checkpoints.clear_unfinished()
            self._describe(goes_on=step is not None and start is checkpoints)
        loop.record.identity = self.fingerprint.identity
        return loop

    def _describe(self, goes_on: bool) -> None:
        """Write config, environment and fingerprint into the run folder. goes_on: the run resumes from its own
        checkpoints."""
        run_dir.write_start(self.folder, self.program.config, self.program.layout.mesh.size)
        if self.program.config.task is None:  # made in Python: no command can build the model again
            run_dir.write(self.folder, recorded_model.FILE, recorded_model.text_of(self.program))
        self.fingerprint = self.fingerprint.record(self.folder, goes_on)

    def _restore(self, loop: Loop, start: Checkpoints, step: int) -> None:
        """Restore state and records from a checkpoint; log where the run resumes and what has changed since."""
        program, info = self.program, loop.tracker.info
        program.state = start.restore(step, program.state)
        loop.record.restore(start.meta(step))
        info(f"resumed from {start.folder / str(step)} at step {step} of {program.total_steps}")
        changed = program.data.changed_by_resume(step)
        if changed is not None and step < program.total_steps:
            loop.tracker.warn(changed)
        for change in run_dir.changes(self.folder, program.config):
            info(f"changed since then: {change}")
        if step == program.total_steps:
            info("run complete: raise train.epochs to continue it, or set another run.dir to start anew")
