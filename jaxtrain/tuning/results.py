"""Write a study's results: best_config.yaml, trials_history.json, plots."""

import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

import joblib
import optuna
import plotly.offline
from optuna.trial import FrozenTrial, TrialState

from jaxtrain import config_io, strict_json
from jaxtrain.tuning.space import apply
from jaxtrain.tuning.study import Study
from torch_bridge.atomic_file import replacing, write_text

PLOTS = (
    "optimization_history",
    "intermediate_values",
    "slice",
    "parallel_coordinate",
    "param_importances",
    "timeline",
)


def write(study: Study, values: Mapping[str, Any], source: Any, plots: bool = True) -> list[pathlib.Path]:
    """Write the files of a study's current state; return their paths. values: the nested config that the study varies,
    from the file `source`."""
    written = [_history(study), _study(study)]
    best = study.best()
    if best is not None:
        written.append(_best_config(study, best, values, source))
    return written + (_plots(study) if plots else [])


def _study(study: Study) -> pathlib.Path:
    """Write study.pkl: the trials as an in-memory Optuna study, for joblib.load without the database."""
    copy = optuna.create_study(direction=study.optuna.direction, study_name=study.optuna.study_name)
    copy.add_trials(study.optuna.get_trials(deepcopy=False))
    path = study.folder / "study.pkl"
    with replacing(path) as aside:
        joblib.dump(copy, aside)
    return path


def _history(study: Study) -> pathlib.Path:
    rows = [_row(study, trial) for trial in study.optuna.get_trials(deepcopy=False)]
    path = study.folder / "trials_history.json"
    write_text(path, strict_json.dumps(rows, indent=1))
    return path


def _row(study: Study, trial: FrozenTrial) -> dict[str, Any]:
    when = {name: getattr(trial, name) for name in ("datetime_start", "datetime_complete")}
    row = {
        "number": trial.number,
        "value": trial.value,
        "params": trial.params,
        "state": trial.state.name,
        **{name: None if value is None else value.isoformat() for name, value in when.items()},
        "intermediate_values": trial.intermediate_values,
        "folder": str(study.folder_of(trial)),
    }
    error = study.error_of(trial)
    return row if error is None else {**row, "error": error}


def _best_config(study: Study, best: FrozenTrial, values: Mapping[str, Any], source: Any) -> pathlib.Path:
    """Write best_config.yaml: the best trial's settings, with the base config's run and tracking sections and a new run
    name."""
    named = apply(values, {**best.params, "run.name": f"{study.folder.name}_best", "run.dir": None})
    path = study.folder / "best_config.yaml"
    head = f"# Trial {best.number} of {study.folder}: {best.value:.6g}\n#   python -m jaxtrain.run --config {path}\n"
    write_text(path, head + config_io.dump(config_io.check(named, source)[1]))
    return path


def _plots(study: Study) -> list[pathlib.Path]:
    """Write Optuna's plots as HTML pages that work offline; skip plots that need more finished trials."""
    folder = study.folder / "plots"
    folder.mkdir(exist_ok=True)
    write_text(folder / "plotly.min.js", plotly.offline.get_plotlyjs())
    written = []
    finished = sum(trial.state == TrialState.COMPLETE for trial in study.optuna.get_trials(deepcopy=False))
    for name in PLOTS if finished >= 2 else PLOTS[:2]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                figure = getattr(optuna.visualization, f"plot_{name}")(study.optuna)
            except (ValueError, RuntimeError):  # importances: all trials gave the same value
                continue
        path = folder / f"{name}.html"
        write_text(path, figure.to_html(include_plotlyjs="directory"))
        written.append(path)
    return written
