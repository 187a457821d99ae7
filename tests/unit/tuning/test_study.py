"""A study: trials share a compiled step, survive faults and kills, and the winner's config trains to its score."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import joblib
import pytest

from jaxtrain import evaluate, run, tune
from tests.unit.tuning import small

pytestmark = pytest.mark.slow

pytest.importorskip("optuna", reason="a study needs the extra `tune`")

SPACE = """
study: {trials: 6, sampler: {startup_trials: 3}, pruner: {name: none}}
optim.lr: {type: loguniform, low: 1.0e-3, high: 1.0e-1}
optim.weight_decay: {type: loguniform, low: 1.0e-5, high: 1.0e-1}
model.dropout: {type: uniform, low: 0.01, high: 0.3}
loss.shrink: {type: uniform, low: 0.001, high: 0.1}
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(space=SPACE, config=small.CONFIG):
        pathlib.Path("space.yaml").write_text(space)
        pathlib.Path("config.yaml").write_text(config)
        return ["--config", "config.yaml", "--space", "space.yaml", "--output", "study"]

    return write


def history(folder="study"):
    return json.loads((pathlib.Path(folder) / "trials_history.json").read_text())


def best_loss(folder):
    return json.loads((pathlib.Path(folder) / "summary.json").read_text())["best"]["loss"]


def test_same_shape_trials_compile_once_beat_the_default_and_the_winner_retrains_to_its_score(files, capsys):
    given = files()
    assert tune.main(given) == 0
    assert "training steps compiled: 1\n" in capsys.readouterr().out
    trials = history()
    assert [trial["state"] for trial in trials] == ["COMPLETE"] * 6
    best = min(trial["value"] for trial in trials)
    assert run.main(["--config", "config.yaml", "run.dir=default"]) == 0
    assert best < best_loss("default")
    assert run.main(["--config", "study/best_config.yaml", "run.dir=again"]) == 0
    assert best_loss("again") == best
    plots = {path.name for path in pathlib.Path("study/plots").iterdir()}
    assert {"optimization_history.html", "slice.html", "param_importances.html", "plotly.min.js"} <= plots
    kept = [trial["number"] for trial in trials if (pathlib.Path(trial["folder"]) / "checkpoints").is_dir()]
    assert [trials[number]["value"] for number in kept] == [best]
    # A study goes on where it stands.
    assert tune.main([*given, "--trials", "7", "--no-plots"]) == 0
    assert [trial["value"] for trial in history()][:6] == [trial["value"] for trial in trials]
    assert len(history()) == 7
    assert [trial.value for trial in joblib.load("study/study.pkl").trials] == [trial["value"] for trial in history()]


def test_a_trial_that_fails_is_recorded_and_the_study_goes_on(files, capsys):
    space = """
study: {trials: 4, sampler: {name: grid}}
loss.broken: {type: categorical, choices: [false, true]}
model.width: {type: categorical, choices: [4, 6]}
"""
    assert tune.main([*files(space), "--no-plots", "train.epochs=2"]) == 0
    states = {(t["params"]["loss.broken"], t["params"]["model.width"]): t for t in history()}
    assert [states[False, w]["state"] for w in (4, 6)] == ["COMPLETE"] * 2
    assert [states[True, w]["state"] for w in (4, 6)] == ["FAIL"] * 2
    assert states[True, 4]["error"] == "RuntimeError: this trial is broken"
    assert "training steps compiled: 2\n" in capsys.readouterr().out


def test_a_study_goes_on_with_the_settings_that_decide_its_scores_only(files, capsys):
    given = [*files(), "--no-plots", "--trials"]
    assert tune.main([*given, "1"]) == 0
    assert tune.main([*given, "2", "optim.clip_norm=0.5"]) == 2
    assert "study was begun with optim.clip_norm=" in capsys.readouterr().err
    assert tune.main([*given, "2", "train.log_every_steps=7", "optim.lr=0.5"]) == 0


def test_a_study_without_a_finished_trial_fails_and_says_why(files, capsys):
    assert tune.main([*files(), "--no-plots", "--trials", "2", "loss.broken=true"]) == 1
    assert "this trial is broken" in capsys.readouterr().err


@pytest.mark.parametrize(
    "pruner",
    [
        "{name: median, startup_trials: 2, warmup_evaluations: 2}",
        "{name: asha, reduction_factor: 2}",
        "{name: hyperband, reduction_factor: 2}",
    ],
    ids=["median", "asha", "hyperband"],
)
def test_a_pruner_ends_hopeless_trials_early_and_no_good_one(pruner, files):
    space = f"""
study: {{trials: 7, sampler: {{name: grid}}, pruner: {pruner}}}
optim.lr: {{type: categorical, choices: [0.03, 1.0e-6, 2.0e-6, 1.0e-7, 2.0e-7, 3.0e-7, 4.0e-7]}}
"""
    assert tune.main([*files(space), "--no-plots"]) == 0
    trials = {trial["params"]["optim.lr"]: trial for trial in history()}
    assert trials.pop(0.03)["state"] == "COMPLETE"
    pruned = [trial for trial in trials.values() if trial["state"] == "PRUNED"]
    assert len(pruned) >= 1
    assert all(len(trial["intermediate_values"]) < 10 for trial in pruned)


SEEDS = "seed: {type: categorical, choices: [1, 2]}\noptim.lr: {type: categorical, choices: [0.01, 0.03]}\n"
NUMBERS = (
    "model.dropout: {type: categorical, choices: [0.1, 0.3]}\nloss.shrink: {type: categorical, choices: [0.01, 1.0]}\n"
)


@pytest.mark.parametrize("settings", [SEEDS, NUMBERS], ids=["seeds differ", "one order of samples"])
def test_several_trials_in_one_program_give_the_same_results_as_one_by_one(files, capsys, settings):
    space = "study: {trials: 4, sampler: {name: grid}, pruner: {name: none}}\n" + settings
    given = files(space)
    assert tune.main([*given, "--no-plots"]) == 0
    alone = {tuple(trial["params"].values()): trial["value"] for trial in history()}
    given[-1] = "together"
    assert tune.main([*given, "--no-plots", "--vmap", "4"]) == 0
    assert "training steps compiled: 1\n" in capsys.readouterr().out
    together = {tuple(trial["params"].values()): trial["value"] for trial in history("together")}
    assert together == pytest.approx(alone, rel=1e-5)
    best = min(history("together"), key=lambda trial: trial["value"])
    assert evaluate.main(["--run", best["folder"], "--trust", "--output", "scores.json"]) == 0
    scores = json.loads(pathlib.Path("scores.json").read_text())
    assert scores["metrics"]["loss"] == pytest.approx(best["value"], rel=1e-5)


def test_trials_of_other_code_are_refused_together(files, capsys):
    given = files("model.width: {type: int, low: 4, high: 8}\n")
    assert tune.main([*given, "--vmap", "2"]) == 2
    assert "this space changes code in model" in capsys.readouterr().err


def test_a_killed_worker_is_replaced_and_its_trial_goes_on_from_its_checkpoint(files):
    given = files(SPACE.replace("trials: 6", "trials: 4"))
    settings = ["train.epochs=400", "evaluation.every_epochs=40", "--workers", "2", "--no-plots"]
    root = pathlib.Path(small.__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "jaxtrain.tune", *given, *settings]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        checkpoint = _wait_for(lambda: next(pathlib.Path("study/trials").glob("*/checkpoints/*/meta.json"), None))
        victim = _wait_for(lambda: _worker_besides(process.pid))
        os.kill(victim, signal.SIGKILL)
        output = process.communicate(timeout=120)[0]
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert "ended with -9" in output
    trials = history()
    died = [trial for trial in trials if "its process died" in trial.get("error", "")]
    assert len(died) == 1
    heir = next(trial for trial in trials if trial["folder"] == died[0]["folder"] and trial is not died[0])
    assert heir["params"] == died[0]["params"]
    assert sum(trial["state"] == "COMPLETE" for trial in trials) == 4, checkpoint


def _worker_besides(parent: int) -> int | None:
    """A worker that has a trial."""
    for path in pathlib.Path("study/workers").iterdir():
        text = path.read_text().split()
        if text and int(text[0]) != parent:
            return int(text[0])
    return None


def _wait_for(found, seconds=90.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = found()
        if value is not None:
            return value
        time.sleep(0.05)
    raise TimeoutError


def test_trials_are_mlflow_runs_nested_in_the_studys(files, monkeypatch):
    mlflow = pytest.importorskip("mlflow.tracking")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)  # which mlflow.set_tracking_uri sets for the process
    given = [*files(), "--no-plots", "--trials", "2", "train.epochs=1", "tracking.mlflow=true"]
    assert tune.main(given) == 0
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{pathlib.Path('study/mlflow.db').absolute()}")
    experiment = client.get_experiment_by_name("tests.unit.tuning.small.train").experiment_id
    found = client.search_runs([experiment])
    parent = next(run.info.run_id for run in found if run.info.run_name == "study")
    nested = [run for run in found if run.data.tags.get("mlflow.parentRunId") == parent]
    assert sorted(run.info.run_name for run in nested) == ["study 0000", "study 0001"]
    value = client.get_run(parent).data.metrics["best_value"]
    assert value == pytest.approx(min(trial["value"] for trial in history()))
    assert {run.info.status for run in found} == {"FINISHED"}
