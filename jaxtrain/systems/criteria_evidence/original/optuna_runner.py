"""The original's study of hyper-parameters over a function of the caller. `jaxtrain tune` searches over whole runs."""

import contextlib
import pathlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import yaml

from jaxtrain import strict_json
from jaxtrain.errors import UserError, install
from jaxtrain.original_configs import plain
from torch_bridge.atomic_file import replacing, write_text

if TYPE_CHECKING:
    import optuna

TPE = {"n_startup_trials": 10, "multivariate": True, "group": True}
PRUNERS = {  # by name: Optuna's class, and the original's defaults
    "median": ("MedianPruner", {"n_startup_trials": 5, "n_warmup_steps": 2, "interval_steps": 1}),
    "hyperband": ("HyperbandPruner", {"min_resource": 1, "max_resource": 10, "reduction_factor": 3}),
    "none": ("NopPruner", {}),
}
SAMPLERS = {"tpe": ("TPESampler", TPE), "random": ("RandomSampler", {})}
DIRECTIONS = ("maximize", "minimize")


class OptunaRunner:
    """An Optuna study, `study`, with the original's samplers, pruners and files.

    storage: URL of a database; without one the study lives in memory. sampler_config, pruner_config: `type` (tpe or
    random; median, hyperband or none) and arguments of Optuna's class. Without them: TPE with Optuna's defaults, and no
    pruner. Raises ValueError for another type or direction.
    """

    def __init__(
        self,
        study_name: str,
        direction: str = "maximize",
        metric: str = "val_f1_macro",
        storage: str | None = None,
        sampler_config: Mapping[str, Any] | None = None,
        pruner_config: Mapping[str, Any] | None = None,
    ):
        if direction not in DIRECTIONS:
            raise UserError(f"direction: {direction!r} is unknown; known: {', '.join(DIRECTIONS)}")
        self.study_name, self.direction, self.metric = study_name, direction, metric
        library = _optuna()
        self.study = library.create_study(
            study_name=study_name,
            direction=direction,
            storage=storage,
            load_if_exists=True,
            sampler=_made(library.samplers, "sampler", SAMPLERS, sampler_config) or library.samplers.TPESampler(),
            pruner=_made(library.pruners, "pruner", PRUNERS, pruner_config) or library.pruners.NopPruner(),
        )

    def suggest_hyperparameters(self, trial: "optuna.Trial", search_space: Mapping[str, Any]) -> dict[str, Any]:
        """Let a trial choose a value for each name. search_space: by name, `type` with `choices` or `low` and `high`.

        Types: categorical, int and float (with `log` and `step`), uniform, loguniform. Raises ValueError for others.
        """
        return {name: _suggest(trial, name, dict(setting)) for name, setting in search_space.items()}

    def optimize(
        self,
        objective_fn: Callable[["optuna.Trial", dict[str, Any]], float],
        n_trials: int,
        search_space: Mapping[str, Any],
        mlflow_tracking_uri: str | None = None,
        timeout: float | None = None,
    ) -> "optuna.Study":
        """Run trials; objective_fn(trial, parameters) gives the metric's value. timeout: s, after which none begins.

        mlflow_tracking_uri: log each trial there as a run of the experiment `study_name`.
        """

        def objective(trial: "optuna.Trial") -> float:
            chosen = self.suggest_hyperparameters(trial, search_space)
            with _run(mlflow_tracking_uri, self.study_name, trial.number, chosen) as log:
                value = objective_fn(trial, chosen)
                log(self.metric, value)
            return value

        self.study.optimize(objective, n_trials=n_trials, timeout=timeout)
        return self.study

    def get_best_trial(self) -> "optuna.trial.FrozenTrial":
        return self.study.best_trial

    def get_best_params(self) -> dict[str, Any]:
        return self.study.best_params

    def get_best_value(self) -> float:
        return self.study.best_value

    def print_best_trial(self) -> None:
        best = self.get_best_trial()
        print(f"Best trial: {best.number}\n  {self.metric}: {best.value}")
        for name, value in best.params.items():
            print(f"  {name}: {value}")

    def save_study(self, output_path: str | pathlib.Path) -> None:
        """Write the study for joblib."""
        import joblib

        with replacing(pathlib.Path(output_path)) as aside:
            joblib.dump(self.study, aside)

    def export_best_config(self, output_path: str | pathlib.Path) -> None:
        """Write the best trial's parameters as YAML, name: value."""
        write_text(output_path, yaml.safe_dump(self.get_best_params(), sort_keys=False))

    def export_trials_history(self, output_path: str | pathlib.Path) -> None:
        """Write number, value, params, state, datetime_start and datetime_complete of each trial as JSON."""
        rows = []
        for trial in self.study.trials:
            times = {name: getattr(trial, name) for name in ("datetime_start", "datetime_complete")}
            rows.append(
                {"number": trial.number, "value": trial.value, "params": trial.params, "state": trial.state.name}
                | {name: None if time is None else time.isoformat() for name, time in times.items()}
            )
        write_text(output_path, strict_json.dumps(rows, indent=2))


def create_search_space_from_config(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Read the search space of a config: its `search_space`, or that of its section `hpo`.

    Raises ValueError where there is none, and for a setting without `type`.
    """
    values = plain(config)
    space = values.get("search_space", (values.get("hpo") or {}).get("search_space"))
    if space is None:
        raise UserError("config: expected a section search_space, or hpo.search_space")
    for name, setting in space.items():
        if not isinstance(setting, Mapping) or "type" not in setting:
            raise UserError(f"search_space.{name}: expected type, with choices or low and high, got {setting!r}")
    return {name: dict(setting) for name, setting in space.items()}


def _suggest(trial: "optuna.Trial", name: str, setting: dict[str, Any]) -> Any:
    kind, log, step = setting.pop("type", None), setting.pop("log", False), setting.pop("step", None)
    try:
        if kind == "categorical":
            return trial.suggest_categorical(name, list(setting["choices"]))
        if kind in ("float", "uniform", "loguniform"):
            ends = float(setting["low"]), float(setting["high"])
            return trial.suggest_float(name, *ends, log=log or kind == "loguniform", step=step)
        if kind == "int":
            return trial.suggest_int(name, int(setting["low"]), int(setting["high"]), log=log, step=step or 1)
    except KeyError as missing:
        raise UserError(f"search_space.{name}: type {kind} wants {missing}") from None
    known = "categorical, int, float, uniform, loguniform"
    raise UserError(f"search_space.{name}.type: {kind!r} is unknown; known: {known}")


def _made(module: Any, what: str, known: Mapping[str, tuple[str, dict]], config: Mapping[str, Any] | None) -> Any:
    if config is None:
        return None
    options = dict(config)
    kind = str(options.pop("type", options.pop("name", next(iter(known))))).lower()
    if kind not in known:
        raise UserError(f"{what}_config.type: {kind!r} is unknown; known: {', '.join(known)}")
    name, defaults = known[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna calls multivariate and group experimental
        return getattr(module, name)(**(defaults | options))


@contextlib.contextmanager
def _run(uri: str | None, experiment: str, number: int, chosen: Mapping[str, Any]) -> Iterator[Callable]:
    if uri is None:
        yield lambda name, value: None
        return
    import mlflow

    mlflow.set_tracking_uri(uri)
    mlflow.set_experiment(experiment)
    with mlflow.start_run(run_name=f"trial_{number}"):
        mlflow.log_params(chosen)
        yield mlflow.log_metric


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ImportError(f"a study needs Optuna: {install('tune')}") from None
    return optuna
