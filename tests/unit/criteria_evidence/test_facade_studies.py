"""The original's study of hyper-parameters: what it draws, optimises and writes."""

import json

import joblib
import pytest
import yaml

optuna = pytest.importorskip("optuna")

from jaxtrain.systems import criteria_evidence as psy  # noqa: E402

SPACE = {
    "learning_rate": {"type": "loguniform", "low": 1e-6, "high": 1e-4},
    "dropout": {"type": "uniform", "low": 0.0, "high": 0.3},
    "batch_size": {"type": "categorical", "choices": [8, 16, 32]},
    "layers": {"type": "int", "low": 1, "high": 3},
    "decay": {"type": "float", "low": 1e-5, "high": 1e-1, "log": True},
}


def close_to_a_tenth(trial, chosen) -> float:
    return -abs(chosen["dropout"] - 0.1)


@pytest.fixture
def runner():
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return psy.OptunaRunner("x", sampler_config={"type": "tpe", "n_startup_trials": 3, "seed": 0})


def test_a_study_is_optimised_and_written(runner, tmp_path, capsys):
    runner.optimize(close_to_a_tenth, 12, SPACE)
    assert len(runner.study.trials) == 12
    assert runner.get_best_value() == max(trial.value for trial in runner.study.trials)
    for trial in runner.study.trials:
        assert set(trial.params) == set(SPACE)
        assert 1e-6 <= trial.params["learning_rate"] <= 1e-4
        assert trial.params["batch_size"] in (8, 16, 32)
    runner.export_best_config(tmp_path / "new/best_config.yaml")
    assert yaml.safe_load((tmp_path / "new/best_config.yaml").read_text()) == runner.get_best_params()
    runner.export_trials_history(tmp_path / "trials_history.json")
    rows = json.loads((tmp_path / "trials_history.json").read_text())
    assert list(rows[0]) == ["number", "value", "params", "state", "datetime_start", "datetime_complete"]
    assert [row["value"] for row in rows] == [trial.value for trial in runner.study.trials]
    runner.save_study(tmp_path / "study.pkl")
    assert joblib.load(tmp_path / "study.pkl").best_params == runner.get_best_params()
    runner.print_best_trial()
    assert f"val_f1_macro: {runner.get_best_value()}" in capsys.readouterr().out


def test_the_defaults_are_the_originals():
    plain = psy.OptunaRunner("x")
    assert type(plain.study.sampler) is optuna.samplers.TPESampler
    assert type(plain.study.pruner) is optuna.pruners.NopPruner
    made = psy.OptunaRunner("y", direction="minimize", sampler_config={"type": "tpe"}, pruner_config={"type": "median"})
    assert made.study.direction is optuna.study.StudyDirection.MINIMIZE
    assert type(made.study.pruner) is optuna.pruners.MedianPruner
    assert (
        type(psy.OptunaRunner("z", pruner_config={"type": "hyperband"}).study.pruner) is optuna.pruners.HyperbandPruner
    )


def test_a_study_goes_on_in_its_database(tmp_path):
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    for trials in (2, 5):
        runner = psy.OptunaRunner("x", storage=storage)
        runner.optimize(close_to_a_tenth, trials - len(runner.study.trials), SPACE)
        assert len(runner.study.trials) == trials


def test_trials_are_runs_of_mlflow(runner, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'm.db'}"
    runner.optimize(close_to_a_tenth, 2, SPACE, mlflow_tracking_uri=uri)
    runs = mlflow.search_runs(experiment_names=["x"])
    assert sorted(runs["metrics.val_f1_macro"]) == sorted(trial.value for trial in runner.study.trials)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: psy.OptunaRunner("x", "up"), "direction: 'up' is unknown"),
        (lambda: psy.OptunaRunner("x", sampler_config={"type": "cma"}), "sampler_config.type: 'cma' is unknown"),
        (lambda: psy.create_search_space_from_config({"hpo": {}}), "expected a section search_space"),
        (
            lambda: psy.create_search_space_from_config({"search_space": {"lr": [1, 2]}}),
            "search_space.lr: expected type",
        ),
        (lambda: suggest({"type": "normal"}), "search_space.lr.type: 'normal' is unknown"),
        (lambda: suggest({"type": "int", "low": 1}), "search_space.lr: type int wants 'high'"),
    ],
)
def test_a_mistake_is_a_value_error(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def suggest(setting):
    runner = psy.OptunaRunner("x")
    return runner.suggest_hyperparameters(runner.study.ask(), {"lr": setting})


def test_a_configs_space_is_read():
    assert psy.create_search_space_from_config({"hpo": {"search_space": SPACE}}) == SPACE
