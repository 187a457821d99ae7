"""What psy's users type: best values of a search, a checkpoint evaluated on a file, MLflow, Hydra's groups."""

import json
import pathlib

import pytest
import torch

from jaxtrain import config_io, doctor, evaluate, run
from jaxtrain.runtime import devices
from jaxtrain.systems import criteria_evidence as psy
from tests.unit.criteria_evidence.golden import table

TINY = "configs/criteria_tiny.yaml"


def test_the_flat_best_values_of_a_search_become_settings(tmp_path):
    best = tmp_path / "best_config.yaml"
    best.write_text(
        "learning_rate: 3e-5\nbatch_size: 8\ngradient_accumulation_steps: 2\nwarmup_ratio: 0.1\ndropout: 0.2"
    )
    config = config_io.load("configs/evidence_tiny.yaml", [f"best_config={best}", "optim.schedule.warmup_ratio=0.2"])[1]
    assert (config.optim.lr, config.data.batch_size, config.train.accumulate_steps) == (3e-5, 16, 2)
    assert (config.model.evidence.dropout, config.optim.schedule.warmup_ratio) == (0.2, 0.2)
    best.write_text("optim.lr: 1e-3\n")
    assert config_io.load(TINY, [f"best_config={best}"])[1].optim.lr == 1e-3
    best.write_text("learning_rat: 1\n")
    with pytest.raises(ValueError, match="best_config.yaml: learning_rat: no counterpart here"):
        config_io.load(TINY, [f"best_config={best}"])
    best.write_text("task: criteria_evidence.criteria\n")
    with pytest.raises(ValueError, match="is a whole config; start it with --config"):
        config_io.load(TINY, [f"best_config={best}"])


def test_the_best_warm_up_takes_the_place_of_the_one_in_the_originals_file(tmp_path):
    path, best = tmp_path / "train.yaml", tmp_path / "best_config.yaml"
    path.write_text("project: criteria\ntraining: {scheduler: {name: linear, warmup_steps: 0}}\n")
    for text in ("warmup_ratio: 0.1\n", "optim.schedule.warmup_ratio: 0.1\n"):
        best.write_text(text)
        schedule = config_io.load(path, [f"best_config={best}"])[1].optim.schedule
        assert (schedule.warmup_steps, schedule.warmup_ratio) == (None, 0.1)


def test_best_values_are_taken_with_hydras_plus(tmp_path):
    pytest.importorskip("hydra")
    path, best = tree(tmp_path), tmp_path / "best_config.yaml"
    best.write_text("learning_rate: 3e-5\n")
    assert config_io.load(path, [f"+best_config={best}"])[1].optim.lr == 3e-5
    with pytest.raises(ValueError, match="nowhere.yaml: no such config file"):
        config_io.load(path, ["+best_config=nowhere.yaml"])


@pytest.mark.parametrize(
    ("project", "watched", "metric"),
    [
        ("criteria", "val_auroc_macro", "auroc"),
        ("criteria", "val_recall_macro", "recall_macro"),
        ("evidence", "validation_start_accuracy", "start_accuracy"),
        ("share", "validation_criteria_precision", "criteria_precision"),
        ("joint", "validation_evidence_end_accuracy", "evidence_end_accuracy"),
    ],
)
def test_every_score_of_the_originals_can_be_watched(tmp_path, project, watched, metric):
    path = tmp_path / "train.yaml"
    path.write_text(f"project: {project}\ntraining: {{monitor_metric: {watched}, logging_steps: 50}}\n")
    assert config_io.load(path)[1].evaluation.metric == metric


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("project: evidence\ndataset: {max_length: 384}", {"data.evidence_max_length": 384}),
        ("project: share\ndataset: {max_length: 384}", {"data.evidence_max_length": 384}),
        ("project: joint\ndataset: {criteria_max_length: 64}", {"data.max_length": 64}),
        ("project: joint\ndataset: {splits: [0.7, 0.3]}", {"data.ratios": [0.7, 0.3, 0.0]}),
        ("project: joint\ndataset: {splits: {train: 0.7, val: 0.2, test: 0.1}}", {"data.ratios": [0.7, 0.2, 0.1]}),
        ("project: joint\nmodel: {dropout: 0.3}", {"model.criteria.dropout": 0.3, "model.evidence.dropout": 0.3}),
        ("project: share\ntraining: {optimizer: {name: sgd}}", {"optim.momentum": 0.9}),
        ("project: share\ntraining: {optimizer: {name: sgd, momentum: 0.5}}", {"optim.momentum": 0.5}),
        ("project: criteria\ntraining: {mixed_precision: false}", {"precision.policy": "fp32"}),
    ],
)
def test_what_the_originals_engines_read_counts(tmp_path, text, wanted):
    path = tmp_path / "train.yaml"
    path.write_text(f"{text}\nlogging_steps: 50\nmonitor_mode: max\n")
    flat = config_io.flatten(config_io.load(path)[1].model_dump(mode="json"))
    assert {key: flat[key] for key in wanted} == wanted


def test_a_constant_rate_may_be_warmed_up(tmp_path):
    path = tmp_path / "train.yaml"
    path.write_text("project: criteria\ntraining: {scheduler: {name: constant_with_warmup, warmup_steps: 7}}\n")
    schedule = config_io.load(path)[1].optim.schedule
    assert (schedule.name, schedule.warmup_steps) == ("constant", 7)


def test_a_task_is_named_by_its_last_part():
    assert config_io.load("configs/evidence_tiny.yaml", ["task=evidence"])[0].report is not None
    with pytest.raises(ValueError, match="'classification' is unknown"):
        config_io.load(TINY, ["task=classification"])


@pytest.mark.slow
def test_a_run_tests_and_registers_its_model_and_a_file_is_evaluated(tmp_path, capsys):
    from mlflow.tracking import MlflowClient

    store, folder = f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path / "run"
    tracked = ["tracking.mlflow=true", f"tracking.mlflow_uri={store}", "tracking.mlflow_model=psy-agents"]
    tracked += ["evaluation.test=true", "checkpoint.torch=original"]
    assert run.main(["--config", TINY, f"run.dir={folder}", "train.epochs=1", *tracked]) == 0
    printed = capsys.readouterr().out
    assert "registered in MLflow: psy-agents, version 1" in printed
    tested = json.loads((folder / "summary.json").read_text())["test"]
    client = MlflowClient(tracking_uri=store)
    (version,) = client.search_model_versions("name='psy-agents'")
    found = client.get_run(version.run_id)
    assert found.data.metrics["test_f1_macro"] == pytest.approx(tested["f1_macro"])
    assert found.data.tags["device"]
    assert {"best.pt", "config.yaml"} == {
        pathlib.Path(f.path).name for f in client.list_artifacts(version.run_id, "model")
    }
    best = folder / "checkpoints" / "best_checkpoint.pt"
    saved = torch.load(best, weights_only=True)
    assert sorted(saved) == table("trainer_run")["best_checkpoint"]["keys"]
    assert saved["best_metric_value"] == pytest.approx(saved["metrics"]["val_f1_macro"])
    arguments = ["--config", TINY, f"checkpoint={best}", f"run.dir={tmp_path / 'eval'}"]
    assert evaluate.main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"] == pytest.approx(tested, abs=1e-6)
    assert evaluate.main([*arguments, "--split", "all"]) == 0
    report = json.loads((tmp_path / "eval" / "reports" / "evaluation_results.json").read_text())
    assert report["rows"] == report["criteria"]["total_samples"] > 100
    assert evaluate.main(["--config", TINY]) == 2
    assert evaluate.main([]) == 2


def test_formats_follow_the_compute_capability():
    assert devices.formats("8.0") == devices.formats("12.0") == {"TF32": True, "bfloat16": True}
    assert devices.formats("7.5") == devices.formats(None) == {"TF32": False, "bfloat16": False}
    assert devices.cuda_version() is None  # the tests' backend is the CPU
    assert "CUDA version" not in doctor.devices()


def tree(folder: pathlib.Path) -> pathlib.Path:
    """The config tree of the original's repository, a file of every group."""
    files = {
        "config.yaml": "defaults: [{data: hf_redsm5}, {model: bert_base}, {training: default}, "
        "{task: criteria}, _self_]\nproject: {name: psy}\nseed: 42\npaths:\n  outputs: outputs/${now:%Y}\n"
        "mlflow:\n  experiment_name: ${project.name}-${task.type}\n  tracking_uri: sqlite:///mlflow.db\n",
        "data/hf_redsm5.yaml": "source: huggingface\nhf_cache_dir: ${oc.env:NO_SUCH_VARIABLE,null}\n",
        "model/bert_base.yaml": "encoder_name: bert-base-uncased\nmax_length: 512\nlora: {enabled: false, r: 8}\n",
        "model/roberta_base.yaml": "encoder_name: roberta-base\nmax_length: 512\nlora: {enabled: false, r: 8}\n",
        "training/default.yaml": "num_epochs: 10\nbatch_size: 16\nlearning_rate: 2e-5\n",
        "task/criteria.yaml": "type: binary_classification\nloss: cross_entropy\n",
        "hpo/stage2_fine.yaml": "n_trials: 24\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "config.yaml"


def test_hydras_groups_and_overrides_are_taken_as_users_type_them(tmp_path):
    pytest.importorskip("hydra")
    overrides = ["model=roberta_base", "+hpo=stage2_fine", "training.num_epochs=20", "training.learning_rate=3e-5"]
    task, config = config_io.load(tree(tmp_path), overrides)
    assert task.original.name.startswith("psy")
    assert (config.model.pretrained, config.train.epochs, config.optim.lr) == ("roberta-base", 20, 3e-5)
    assert (config.tracking.mlflow, config.tracking.mlflow_uri) == (True, "sqlite:///mlflow.db")
    assert config.evaluation.test


@pytest.mark.slow
def test_a_script_tracks_its_run_as_the_originals(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.chdir(tmp_path)
    config = {"training": {"epochs": 3, "betas": [0.9, 0.999]}}
    psy.configure_mlflow(
        f"sqlite:///{tmp_path / 'mlflow.db'}", "Criteria", artifact_location=(tmp_path / "artifacts").as_uri()
    )
    with psy.mlflow_run("criteria", tags={"task": "criteria"}, config=config) as active:
        mlflow.log_metrics({"train_loss_step": 0.5}, step=2)
    found = mlflow.get_run(active.info.run_id)
    assert found.data.params == {"training.epochs": "3", "training.betas": "[0.9, 0.999]"}
    assert found.data.tags["config_hash"] == psy.config_hash(config)
    assert found.data.tags["git_sha"] == "unknown"
    assert found.data.metrics == {"train_loss_step": 0.5}
