"""Scripts of the five originals' kind train and evaluate here after a change of their import lines alone."""

import json
import math
import pathlib
import random
import re
import runpy
import sys

import numpy as np
import pytest
import torch

from tests.e2e.original_scripts import data

SCRIPTS = pathlib.Path(__file__).parent / "original_scripts"
SPLAT = "--vocab_path vocab.json --weapon_vocab_path weapon_vocab.json"
SMALL = "--embedding_dim 8 --hidden_dim 16 --num_layers 1 --num_heads 4 --num_inducing_points 4 --batch_size 16"
PRIMARY = "--primary-embedding-dim 8 --primary-hidden-dim 16 --primary-num-layers 1 --primary-num-heads 4"


@pytest.fixture
def folder(tmp_path, monkeypatch, request):
    """A folder, the present one, with the data of the original that the test names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    getattr(data, request.param)(tmp_path)
    return tmp_path


@pytest.fixture
def run(monkeypatch):
    def run(name: str, arguments: str):
        """Run a script as `python name.py arguments` does, in this process."""
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments.split()])
        return runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")

    yield run
    torch.use_deterministic_algorithms(False)


def of(name: str):
    return pytest.mark.parametrize("folder", [name], indirect=True, ids=[name])


@pytest.mark.parametrize("name", sorted(p.stem for p in SCRIPTS.glob("*_*.py") if p.stem != "__init__"))
def test_a_script_names_this_package_in_its_import_lines_only(name):
    lines = (SCRIPTS / f"{name}.py").read_text().splitlines()
    mentions = [line for line in lines if "jaxtrain" in line]
    assert mentions
    assert all(re.match(r"from jaxtrain\.systems\.[\w.]+ import ", line) for line in mentions)


@of("hjepa")
@pytest.mark.slow
def test_hjepa_trains_goes_on_and_is_evaluated(folder, run):
    run("hjepa_train", "--config config.yaml --no_wandb")
    first = torch.load("results/checkpoints/checkpoint_latest.pth", weights_only=True)
    assert (first["epoch"], first["global_step"]) == (1, 4)
    run("hjepa_train", "--config config.yaml --epochs 3 --resume results/checkpoints/checkpoint_latest.pth")
    again = torch.load("results/checkpoints/checkpoint_latest.pth", weights_only=True)
    assert (again["epoch"], again["global_step"]) == (2, 6)
    sizes = "--image-size 32 --batch-size 4 --num-workers 0 --num-classes 2 --few-shot-n-way 2 --few-shot-k-shots 1"
    short = "--linear-probe-epochs 1 --fine-tune-epochs 1 --few-shot-episodes 2 --knn-k 3 --hierarchy-levels 0 1"
    checkpoint = "--config config.yaml --checkpoint results/checkpoints/checkpoint_best.pth"
    run("hjepa_evaluate", f"{checkpoint} --dataset imagenet --data-path images {sizes} {short}")
    results = json.loads(pathlib.Path("results/evaluation/evaluation_results.json").read_text())
    assert set(results) == {"level_0", "level_1", "metadata"}
    assert set(results["level_1"]) == {"linear_probe", "knn", "feature_quality", "fine_tune", "few_shot"}
    assert 0 <= results["level_0"]["knn"]["accuracy"] <= 100


@of("splatnlp")
@pytest.mark.slow
def test_splatnlp_trains_an_autoencoder_follows_and_a_build_is_reconstructed(folder, run):
    files = f"--data_path tokenized.csv {SPLAT} --output_dir out"
    run(
        "splatnlp_train",
        f"{files} {SMALL} --num_epochs 2 --num_workers 0 --device cpu --use_layer_norm True --dropout 0",
    )
    history = json.loads(pathlib.Path("out/metrics_history.json").read_text())
    assert len(history["train"]["loss"]) == len(history["val"]["f1"]) == 2
    assert sorted(p.name for p in pathlib.Path("out/checkpoints").iterdir()) == ["epoch_001.pth", "epoch_002.pth"]
    files = "--vocab-path vocab.json --weapon-vocab-path weapon_vocab.json --data-csv tokenized.csv"
    short = "--epochs 2 --buffer-size 100 --sae-batch-size 8 --steps-before-train 30 --primary-batch-size 16"
    more = f"{PRIMARY} --primary-num-inducing 4 {short} --primary-data-fraction 1 --resample-steps 6"
    run("splatnlp_sae", f"--model-checkpoint out/model.pth {files} --save-dir sae {more}")
    assert json.loads(pathlib.Path("sae/sae_run_config.json").read_text())["sae_hidden_dim"] == 64
    trained = "--model out/model.pth --params out/model_params.json --sae sae/sae_model_final.pth --data tokenized.csv"
    run("splatnlp_evaluate", f"{trained} --vocab vocab.json --weapon_vocab weapon_vocab.json --output results.json")
    results = json.loads(pathlib.Path("results.json").read_text())
    assert len(results["predictions"]) >= 32
    assert results["metrics"]["loss"] == pytest.approx(0.5, abs=0.4)


@of("sherlock")
@pytest.mark.slow
def test_sherlock_trains_and_reconstructs(folder, run):
    run("sherlock_train", "--config config.yaml")
    names = {p.name for p in pathlib.Path("checkpoints").iterdir()}
    assert {"best_checkpoint.pt", "checkpoint_epoch_0.pt", "checkpoint_epoch_1.pt", "final_checkpoint.pt"} <= names
    run("sherlock_evaluate", "--checkpoint checkpoints/best_checkpoint.pt --config config.yaml --num-samples 2")
    scores = json.loads(pathlib.Path("reconstruction_results/scores.json").read_text())
    assert len(scores) == 2
    assert all(math.isfinite(score["fmri_correlation"]) for score in scores)


@of("psy")
@pytest.mark.slow
def test_psy_trains_criteria_and_evaluates_the_checkpoint(folder, run):
    run("psy_train_criteria", "train.yaml training.epochs=3")
    (summary,) = pathlib.Path("outputs/models").glob("*/summary.json")
    assert "test_f1_macro" in json.loads(summary.read_text())["test_metrics"]
    run("psy_eval_criteria", "train.yaml checkpoint=outputs/checkpoints/best_checkpoint.pt eval_batch_size=16")
    assert json.loads(pathlib.Path("outputs/evaluation_results.json").read_text())["total_samples"] == 40


@of("psy")
@pytest.mark.parametrize("kind", ["evidence", "share", "joint"])
def test_psys_other_architectures_train_in_a_loop_of_the_script(kind, folder, run):
    run("psy_train_span", f"--kind {kind} --csv annotations.csv --encoder encoder --epochs 2 --lr 1e-2 --out {kind}")
    results = json.loads(pathlib.Path(f"{kind}/results.json").read_text())
    assert len(results["history"]) == 2
    assert results["history"][1]["train_loss"] < results["history"][0]["train_loss"] + 0.5


@of("memory")
@pytest.mark.slow
def test_memory_trains_goes_on_and_is_evaluated(folder, run):
    config = "--config configs/adapter_qwen2.5_1.5b.yaml"
    run("memory_train", config)
    state = json.loads(pathlib.Path("outputs/final_model/trainer_state.json").read_text())
    assert state["global_step"] == 4
    run("memory_train", f"{config} --resume outputs/checkpoint-2")
    run("memory_train", f"{config} --find_lr")
    data_set = "--dataset HuggingFaceH4/ultrachat_200k --split test_sft"
    run("memory_eval", f"--checkpoint outputs/final_model {data_set} --output results.json")
    results = json.loads(pathlib.Path("results.json").read_text())
    assert results["num_samples"] == 8
    assert results["sampled"].startswith("two?")
