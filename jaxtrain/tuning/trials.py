"""A trial is a run in the study's folder, whose evaluations Optuna sees as they come."""

import gc
import math
import shutil
from collections.abc import Mapping
from typing import Any

from optuna.trial import Trial, TrialState

from jaxtrain import config_io
from jaxtrain.config import TrainingConfig
from jaxtrain.errors import UserError
from jaxtrain.task import Task
from jaxtrain.train.code import code_of
from jaxtrain.train.out_of_memory import is_out_of_memory
from jaxtrain.train.trainer import Trainer
from jaxtrain.tuning.space import Space, apply
from jaxtrain.tuning.study import Study


class Trials:
    """Runs trials of one search in this process. Those of one code share their data and compiled programs.

    values: the nested config that the space varies. source: its file, for messages. tracked: settings of a trial's
    `tracking` section beside the config's own.
    """

    def __init__(self, study: Study, space: Space, values: Mapping[str, Any], source: Any, tracked: Mapping[str, Any]):
        self.study, self.space, self.values, self.source = study, space, values, source
        self.fixed = config_io.flatten(config_io.check(values, source)[1].model_dump(mode="json"))
        self.tracked = tracked
        self._codes: dict[str, Trainer] = {}
        self.compilations = 0

    def config(self, trial: Any, chosen: Mapping[str, Any]) -> tuple[Task, TrainingConfig]:
        """The config of a trial's run."""
        folder = self.study.folder_of(trial)
        run = {"name": f"{self.study.folder.name} {trial.number:04d}", "dir": str(folder), "quiet": True}
        own = {f"run.{key}": value for key, value in run.items()} | {
            f"tracking.{key}": value for key, value in self.tracked.items()
        }
        return config_io.check(apply(self.values, {**chosen, **own}), f"{self.source}, trial {trial.number}")

    def choose(self, trial: Trial) -> dict[str, Any]:
        """What the sampler wants this trial to try."""
        return self.space.choose(lambda name, setting: setting.suggest(trial, name), self.fixed)

    def run(self, trial: Trial) -> TrialState:
        """Train to the end, to the pruner's word, or to an error, which is recorded: the study goes on."""
        try:
            task, config = self.config(trial, self.choose(trial))
            state, value = self._train(trial, self._trainer(task, config))
        except Exception as error:
            state, value = TrialState.FAIL, None
            trial.set_user_attr("error", describe(error))
        self.tell(trial, state, value)
        return state

    def tell(self, trial: Trial, state: TrialState, value: float | None) -> None:
        self.study.optuna.tell(trial, value if state == TrialState.COMPLETE else None, state)
        if self.study.settings.keep_checkpoints == "best":
            self._clear()

    def _trainer(self, task: Task, config: TrainingConfig) -> Trainer:
        """A trainer at the start of this trial: a variant of an earlier one of the same code, where there is one."""
        code = code_of(config, task)
        if code not in self._codes:
            self._codes = {}  # one code at a time: its data may be large
            gc.collect()
            self._codes[code] = Trainer(config=config, task=task, abstract=True)
        return self._codes[code].variant(config)

    def _train(self, trial: Trial, trainer: Trainer) -> tuple[TrialState, float | None]:
        metric, mode = trainer.config.evaluation.metric, trainer.config.evaluation.mode
        pruned = False

        def report(step: int, metrics: Mapping[str, float]) -> bool:
            nonlocal pruned
            if math.isfinite(metrics[metric]):
                trial.report(metrics[metric], evaluation_number(trainer, step))
                pruned = trial.should_prune()
            return pruned

        before = trainer.compilations
        try:
            history = trainer.train(after_evaluation=report)
        finally:
            self.compilations += trainer.compilations - before
        scores = [metrics[metric] for metrics in history["val_history"] if math.isfinite(metrics[metric])]
        if not scores:
            raise UserError(f"evaluation.metric: {metric} was never a finite number in this trial")
        best = max(scores) if mode == "max" else min(scores)
        return (TrialState.PRUNED, None) if pruned else (TrialState.COMPLETE, best)

    def _clear(self) -> None:
        """Delete the checkpoints of ended trials that are not the best."""
        best = self.study.best()
        kept = None if best is None else self.study.folder_of(best)
        for other in self.study.ended():
            folder = self.study.folder_of(other)
            if folder != kept:
                shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def evaluation_number(trainer: Trainer, step: int) -> int:
    """1 for the first evaluation of a run, whatever its batch size."""
    evaluation = trainer.config.evaluation
    every = evaluation.every_steps or (evaluation.every_epochs or 1) * trainer.steps_per_epoch
    return -(-step // every)


def describe(error: Exception) -> str:
    """One line for the study's record."""
    kind = "out of memory" if is_out_of_memory(error) else type(error).__name__
    return f"{kind}: {' '.join(str(error).split())}"[:2000]
