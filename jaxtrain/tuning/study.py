"""A study in a database that several workers share: workers take trials, and retry trials of dead workers."""

import contextlib
import datetime
import fcntl
import fnmatch
import itertools
import os
import pathlib
import socket
import uuid
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from jaxtrain.errors import UserError, at, one_line, reason, shortened
from jaxtrain.train.resume.fingerprint import FREE
from jaxtrain.train.tracking import local_database
from jaxtrain.tuning.space import Space

MOST_ATTEMPTS = 2  # a trial whose process died this many times is given up
ENDED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
SCORING = {  # a resumed run may change these, a study may not
    "task", "init_from", "train.epochs", "train.steps", "train.nan_policy", "train.max_skipped_steps",
    "evaluation.every_epochs", "evaluation.every_steps", "evaluation.patience", "evaluation.min_delta",
}  # fmt: skip
ASKING_S = 10.0  # a trial without a worker for longer: its worker died while it took the trial


DATABASE_ERRORS = (SQLAlchemyError, optuna.exceptions.StorageInternalError)


class StudyError(UserError):
    """The study's database failed."""

    exit_code = 1


class Study:
    """An Optuna study and its folder.

    folder: holds study.db (unless `storage` names another database), trials/<number>/ and workers/. A worker holds a
    lock on a file of its own until it ends, even if it is killed. A trial whose worker's file is not locked is tried
    again, from its last checkpoint. mode: "min" or "max". worker: a number that gives workers different sampler seeds.
    """

    def __init__(self, folder: pathlib.Path, space: Space, mode: str, storage: str | None = None, worker: int = 0):
        self.folder, self.settings = folder, space.study
        self._workers = folder / "workers"
        self._workers.mkdir(parents=True, exist_ok=True)
        self.me = uuid.uuid4().hex
        path = self._workers / self.me
        with at(path):
            self._alive = path.open("w")
            fcntl.flock(self._alive, fcntl.LOCK_EX)
            self._alive.write(f"{os.getpid()} on {socket.gethostname()}\n")
            self._alive.flush()
        with self.lock():
            self.optuna = _open(folder, space, mode, storage, worker)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Return a context that only one worker can be in at a time."""
        path = self.folder / "study.lock"
        with path.open("w") as file:
            with at(path):
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def check_settings(self, fixed: Mapping[str, Any]) -> None:
        """Raise UserError if the study was begun with other settings. fixed: the settings that do not vary."""
        fixed = {key: value for key, value in fixed.items() if _decides(key)}
        with self.lock():
            known = self.optuna.user_attrs.get("settings")
            if known is None:
                self.optuna.set_user_attr("settings", fixed)
                return
        changed = [key for key, value in fixed.items() if key in known and known[key] != value]
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise UserError(
                f"{self.folder}: this study was begun with {changed[0]}={shortened(known[changed[0]])}, now it is "
                f"{shortened(fixed[changed[0]])}{more}: such scores do not compare. Give the settings that it had, or "
                "choose another --output"
            )

    def take(self, most: int, trials: int) -> list[Trial]:
        """Take up to `most` trials for this worker, as long as fewer than `trials` have begun."""
        with self.lock():
            self._try_again()
            taken: list[Trial] = []
            while len(taken) < most and len(self.begun()) < trials:
                trial = self.optuna.ask()
                trial.set_user_attr("worker", self.me)
                taken.append(trial)
        return taken

    def begun(self) -> list[FrozenTrial]:
        """Return the trials that run or have ended, without those that another trial continues."""
        died = self._died()
        found = self.optuna.get_trials(deepcopy=False)
        return [t for t in found if t.state != TrialState.WAITING and not died.get(str(t.number), {}).get("continued")]

    def ended(self) -> list[FrozenTrial]:
        return [trial for trial in self.begun() if trial.state in ENDED]

    def best(self) -> FrozenTrial | None:
        return self.optuna.best_trial if any(t.state == TrialState.COMPLETE for t in self.begun()) else None

    def folder_of(self, trial: Any) -> pathlib.Path:
        """Return the folder of a trial's run; a trial that continues another one uses that one's folder."""
        return self.folder / "trials" / f"{trial.user_attrs.get('first', trial.number):04d}"

    def error_of(self, trial: FrozenTrial) -> str | None:
        """Return why a trial failed, None if it did not."""
        return trial.user_attrs.get("error") or self._died().get(str(trial.number), {}).get("error")

    def close(self) -> None:
        """Sign this worker off; call it when no taken trial is left."""
        self._alive.close()
        (self._workers / self.me).unlink(missing_ok=True)

    def _try_again(self) -> None:
        for trial in self.begun():
            if trial.state != TrialState.RUNNING or not self._lost(trial):
                continue
            attempt, first = trial.user_attrs.get("attempt", 1), trial.user_attrs.get("first", trial.number)
            preempted = trial.user_attrs.get("preempted", False)
            again = preempted or attempt < MOST_ATTEMPTS
            if again:
                self.optuna.enqueue_trial(trial.params, {"first": first, "attempt": attempt + (not preempted)})
            error = f"its process died, attempt {attempt} of {MOST_ATTEMPTS} (killed, or out of host memory)"
            error = "preempted; it was saved" if preempted else error
            self.optuna.set_user_attr("died", {**self._died(), trial.number: {"error": error, "continued": again}})
            self.optuna.tell(trial.number, state=TrialState.FAIL)

    def _died(self) -> dict[str, dict]:
        return self.optuna.user_attrs.get("died", {})

    def _lost(self, trial: FrozenTrial) -> bool:
        """Return True if the worker of a running trial has died. A worker without a file is on another machine."""
        worker = trial.user_attrs.get("worker")
        if worker is None:
            begun = trial.datetime_start or datetime.datetime.now()
            return datetime.datetime.now() - begun > datetime.timedelta(seconds=ASKING_S)
        path = self._workers / worker
        if worker == self.me or not path.is_file():
            return False
        with path.open() as file, at(path):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True


@contextlib.contextmanager
def database_faults(folder: pathlib.Path, storage: str | None) -> Iterator[None]:
    """Inside the context, an error of the study's database is raised as a StudyError, in one sentence."""
    try:
        yield
    except DATABASE_ERRORS as error:
        place = f"--storage {storage}" if storage else str(folder / "study.db")
        said = reason(error.__cause__ or error)
        raise StudyError(
            f"{place}: the database failed: {said}. What it holds stays: make room, look after its rights or its "
            "server, and start the same command again to go on"
        ) from None


def _decides(key: str) -> bool:
    """Return True if trials with another value of this setting would have scores that do not compare."""
    return key in SCORING or not any(fnmatch.fnmatchcase(key, free) for free in FREE)


def _open(folder: pathlib.Path, space: Space, mode: str, storage: str | None, worker: int) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    direction = {"max": optuna.study.StudyDirection.MAXIMIZE, "min": optuna.study.StudyDirection.MINIMIZE}[mode]
    study = optuna.create_study(
        storage=_database(folder, storage),
        study_name=folder.name,
        direction=direction,
        pruner=_pruner(space),
        load_if_exists=True,
    )
    if study.direction != direction:
        raise UserError(
            f"{folder}: this study is to {study.direction.name.lower()}, but evaluation.mode is {mode} now; choose "
            "another --output"
        )
    study.sampler = _sampler(space, (space.study.seed * 1_000_003 + len(study.trials) * 1009 + worker) % 2**32)
    if space.study.sampler.name == "grid":
        for choices in itertools.product(*(setting.choices or () for setting in space.settings.values())):
            study.enqueue_trial(dict(zip(space.settings, choices, strict=True)), skip_if_exists=True)
    return study


def _database(folder: pathlib.Path, storage: str | None) -> optuna.storages.RDBStorage:
    own = folder / "study.db"
    url = storage or local_database.address(own).replace("{", "{{").replace("}", "}}")  # Optuna formats it
    patient = {"connect_args": {"timeout": 100}} if url.startswith("sqlite") else {}
    try:
        return optuna.storages.RDBStorage(url, engine_kwargs=patient)
    except (SQLAlchemyError, ImportError, LookupError, ValueError) as error:  # unknown, missing, or without driver
        place = f"--storage {storage}" if storage else str(own)
        wanted = "wanted a database as sqlite:////folder/study.db or postgresql://host/name, its driver installed"
        raise UserError(f"{place}: cannot be opened: {one_line(error.__cause__ or error)}; {wanted}") from None


def _sampler(space: Space, seed: int) -> optuna.samplers.BaseSampler:
    chosen = space.study.sampler
    if chosen.name != "tpe":
        return optuna.samplers.RandomSampler(seed)  # the trials of a grid are enqueued instead
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(
            n_startup_trials=chosen.startup_trials, multivariate=True, group=True, constant_liar=True, seed=seed
        )


def _pruner(space: Space) -> optuna.pruners.BasePruner:
    chosen = space.study.pruner
    return {
        "none": lambda: optuna.pruners.NopPruner(),
        "median": lambda: optuna.pruners.MedianPruner(chosen.startup_trials, chosen.warmup_evaluations),
        "asha": lambda: optuna.pruners.SuccessiveHalvingPruner(chosen.min_evaluations, chosen.reduction_factor),
        "hyperband": lambda: optuna.pruners.HyperbandPruner(
            chosen.min_evaluations, reduction_factor=chosen.reduction_factor
        ),
    }[chosen.name]()
