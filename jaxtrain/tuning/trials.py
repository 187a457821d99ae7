"""Run trials: a trial is a run in the study's folder that reports each evaluation to Optuna."""

import gc
import math
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from optuna.trial import Trial, TrialState

from jaxtrain import config_io
from jaxtrain.config import TrainingConfig
from jaxtrain.errors import UserError, file_sentence
from jaxtrain.runtime import cpu_threads
from jaxtrain.runtime.preemption import Preempted
from jaxtrain.task import Task
from jaxtrain.train.compilation.compile_key import code_of, differences
from jaxtrain.train.compilation.out_of_memory import is_out_of_memory
from jaxtrain.train.program import Program
from jaxtrain.train.search.vmap_trainer import FolderMember, Outcome, Population
from jaxtrain.train.trainer import Trainer
from jaxtrain.tuning import torch_modules
from jaxtrain.tuning.space import Space, apply
from jaxtrain.tuning.study import DATABASE_ERRORS, Study


class Trials:
    """Runs trials of one search in this process. Trials with the same compiled code share data and programs.

    values: the nested config that the space varies. source: its file, for messages. tracked: additional settings for a
    trial's `tracking` section.
    """

    def __init__(self, study: Study, space: Space, values: Mapping[str, Any], source: Any, tracked: Mapping[str, Any]):
        self.study, self.space, self.values, self.source = study, space, values, source
        self.task, config = config_io.check(values, source)
        self.fixed = config_io.flatten(config.model_dump(mode="json"))
        self.tracked = tracked
        self._templates: dict[str, Trainer] = {}
        self.compilations = 0

    def config(self, trial: Any, chosen: Mapping[str, Any]) -> tuple[Task, TrainingConfig]:
        """Return the task and the config of a trial's run."""
        folder = self.study.folder_of(trial)
        run = {"name": f"{self.study.folder.name} {trial.number:04d}", "dir": str(folder), "quiet": True}
        own = {f"run.{key}": value for key, value in run.items()} | {
            f"tracking.{key}": value for key, value in self.tracked.items()
        }
        own["checkpoint.export"] = False  # of hundreds of trials, `jaxtrain export` writes the one that counts
        return config_io.check(apply(self.values, {**chosen, **own}), f"{self.source}, trial {trial.number}")

    def choose(self, trial: Trial) -> dict[str, Any]:
        """Return the settings that the sampler chooses for this trial."""
        return self.space.choose(lambda name, setting: setting.suggest(trial, name), self.fixed)

    def run(self, trial: Trial) -> TrialState:
        """Train until the end, until pruned, or until an error; return the state. The study goes on after an error,
        which is recorded."""
        try:
            task, config = self.config(trial, self.choose(trial))
            state, value = self._train(trial, self._trainer(task, config))
        except Preempted:
            trial.set_user_attr("preempted", True)
            raise
        except DATABASE_ERRORS:  # of the study, which cannot record why a trial failed either
            raise
        except Exception as error:
            state, value = TrialState.FAIL, None
            trial.set_user_attr("error", describe(error))
        self.tell(trial, state, value)
        return state

    def check_population(self) -> None:
        """Raise UserError if trials of this space cannot be trained in one program. Torch modules show it only once
        they are made: those of another structure then have a program of their own."""
        if self._of_modules:
            return
        first = self._config_at(0)
        sections = sorted({name for end in (0, 1) for name in differences(first[1], self._config_at(end)[1], first[0])})
        if sections:
            numbers = [
                "optim.lr",
                "optim.weight_decay",
                "optim.clip_norm",
                "optim.schedule.*",
                *first[0].traced_hparams,
            ]
            raise UserError(
                f"--vmap: trials of one program differ in numbers only, but this space changes code in "
                f"{', '.join(sections)}. Numbers of {self.source}: {', '.join(numbers)}; 0 and null are code"
            )

    def run_together(self, trials: Sequence[Trial]) -> None:
        """Train these trials in one program; of torch modules, in one per structure. A trial with a non-finite loss
        fails alone; the study's pruner ends others, and their lanes are freed."""
        try:
            configs = [self.config(trial, self.choose(trial))[1] for trial in trials]
            batches = self._batches(configs)
        except DATABASE_ERRORS:
            raise
        except Exception as error:
            self._all_failed(trials, error)
            return
        for positions, programs in batches:
            taken = [trials[position] for position in positions]
            own = {program.config.run.dir: configs[p] for program, p in zip(programs, positions, strict=True)}
            before = programs[0].compilations
            try:
                population = Population(
                    programs,
                    lambda program, own=own: FolderMember(program, own[program.config.run.dir]),
                    lambda step, metrics, taken=taken, first=programs[0]: self._prune(taken, first, step, metrics),
                )
                outcomes = population.train()
            except DATABASE_ERRORS:
                raise
            except Exception as error:
                self._all_failed(taken, error)
                continue
            finally:
                self.compilations += programs[0].compilations - before
            for trial, member, outcome in zip(taken, population.members, outcomes, strict=True):
                self._tell_outcome(trial, member.pruned, outcome)

    def _all_failed(self, trials: Sequence[Trial], error: Exception) -> None:
        for trial in trials:
            trial.set_user_attr("error", describe(error))
            self.tell(trial, TrialState.FAIL, None)

    def _batches(self, configs: Sequence[TrainingConfig]) -> list[tuple[list[int], list[Program]]]:
        """Return positions and programs of the trials that train together."""
        if not self._of_modules:
            template = self._template(self.task, configs[0])
            return [(list(range(len(configs))), [template.program.variant(config) for config in configs])]
        prepared = torch_modules.programs(configs)
        place = {config.run.dir: position for position, config in enumerate(configs)}
        for note in prepared.notes:
            print(f"trials in programs of their own: {note}", flush=True)
        return [([place[plan.config.run.dir] for plan in b.plans], b.programs) for b in prepared.batches]

    @property
    def _of_modules(self) -> bool:
        return "model" in self.task.sections and self.task.sections["model"] is torch_modules.Model

    def _prune(self, trials: Sequence[Trial], program: Program, step: int, metrics: Mapping[int, Any]) -> list[int]:
        """Report an evaluation to the study; return the positions of the trials that its pruner ends."""
        metric, pruned = program.config.evaluation.metric, []
        for position, found in metrics.items():
            if math.isfinite(found[metric]):
                trials[position].report(found[metric], evaluation_number(program, step))
                pruned += [position] if trials[position].should_prune() else []
        return pruned

    def _tell_outcome(self, trial: Trial, pruned: bool, outcome: Outcome) -> None:
        error, value = outcome.error, None
        if error is None and not pruned:
            try:
                value = best_score(outcome.program.config.evaluation, outcome.history)
            except UserError as never:
                error = never
        if error is not None:
            trial.set_user_attr("error", describe(error))
        ended = TrialState.PRUNED if pruned else TrialState.COMPLETE
        self.tell(trial, ended if error is None else TrialState.FAIL, value)

    def _config_at(self, end: int) -> tuple[Task, TrainingConfig]:
        inside = lambda setting: setting.high if setting.ends[end] == 0.0 and setting.high else setting.ends[end]
        chosen = self.space.choose(lambda name, setting: inside(setting), self.fixed)
        return config_io.check(apply(self.values, chosen), self.source)

    def tell(self, trial: Trial, state: TrialState, value: float | None) -> None:
        self.study.optuna.tell(trial, value if state == TrialState.COMPLETE else None, state)
        if self.study.settings.keep_checkpoints == "best":
            self._clear()

    def _trainer(self, task: Task, config: TrainingConfig) -> Trainer:
        """Return a new trainer for this trial; it shares data and programs with earlier trials of the same code."""
        return self._template(task, config).variant(config)

    def _template(self, task: Task, config: TrainingConfig) -> Trainer:
        code = code_of(config, task)
        if code not in self._templates:
            self._templates = {}  # keep one template only: its data may be large
            gc.collect()
            with cpu_threads.limited(config.shard.threads):
                self._templates[code] = Trainer(config=config, task=task, abstract=True)
        return self._templates[code]

    def _train(self, trial: Trial, trainer: Trainer) -> tuple[TrialState, float | None]:
        metric, pruned = trainer.config.evaluation.metric, False

        def report(step: int, metrics: Mapping[str, float]) -> bool:
            nonlocal pruned
            if math.isfinite(metrics[metric]):
                trial.report(metrics[metric], evaluation_number(trainer, step))
                pruned = trial.should_prune()
            return pruned

        before = trainer.program.compilations
        try:
            history = trainer.train(after_evaluation=report)
        finally:
            self.compilations += trainer.program.compilations - before
        best = best_score(trainer.config.evaluation, history)
        return (TrialState.PRUNED, None) if pruned else (TrialState.COMPLETE, best)

    def _clear(self) -> None:
        """Delete the checkpoints of ended trials other than the best."""
        best = self.study.best()
        kept = None if best is None else self.study.folder_of(best)
        for other in self.study.ended():
            folder = self.study.folder_of(other)
            if folder != kept:
                shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def evaluation_number(trainer: Trainer | Program, step: int) -> int:
    """Return the number of the evaluation at a step: 1 for the first one of a run, independent of the batch size."""
    evaluation = trainer.config.evaluation
    every = evaluation.every_steps or (evaluation.every_epochs or 1) * trainer.steps_per_epoch
    return -(-step // every)


def best_score(evaluation: Any, history: Mapping[str, Any]) -> float:
    """Return the best value of evaluation.metric in a run's history. Raises UserError if it was never finite, and if
    nothing was evaluated."""
    if not history["val_history"]:
        raise UserError(
            f"evaluation.metric: trials are compared by {evaluation.metric}, and this one made no evaluation: the "
            "config has no validation data, or evaluates after its last step. With `task: torch_module` let the "
            "function of data.target take `split` and return a Dataset for `validation`"
        )
    values = [metrics[evaluation.metric] for metrics in history["val_history"]]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        raise UserError(f"evaluation.metric: {evaluation.metric} was never a finite number in this trial")
    return max(finite) if evaluation.mode == "max" else min(finite)


def describe(error: Exception) -> str:
    """Describe an error in one line, for the study's record."""
    if isinstance(error, OSError) and error.errno is not None:
        return file_sentence(error)[:2000]
    kind = "out of memory" if is_out_of_memory(error) else type(error).__name__
    return f"{kind}: {' '.join(str(error).split())}"[:2000]
