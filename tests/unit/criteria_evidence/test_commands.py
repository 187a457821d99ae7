"""The commands on the tiny configs: training to the stated metric, few programs, an export that transformers reads."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxtrain import config_io, export, tune
from jaxtrain.train import run_dir
from jaxtrain.train.trainer import Trainer
from tests.unit.criteria_evidence.judge import transformers

pytestmark = pytest.mark.slow

CONFIGS = pathlib.Path(__file__).parents[3] / "configs"


def trained(name: str, folder: pathlib.Path, *settings: str) -> Trainer:
    own = [f"run.dir={folder}", "run.quiet=true", "tracking.tensorboard=false", "shard.devices=1", *settings]
    task, config = config_io.load(CONFIGS / f"{name}.yaml", own)
    trainer = Trainer(config=config, task=task)
    trainer.train()
    return trainer


def test_a_run_with_buckets_reaches_its_metric_and_compiles_no_more_than_a_step_per_width(tmp_path):
    trainer = trained("evidence_buckets_tiny", tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["best"]["span_em"] > 0.9
    assert 2 <= trainer.program.compilations <= trainer.config.data.num_buckets


@pytest.mark.parametrize("name", ["share_tiny", "joint_tiny"])
def test_share_and_joint_log_both_losses_of_every_step(name, tmp_path):
    trained(name, tmp_path, "train.epochs=null", "train.steps=4", "train.log_every_steps=1")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        values = line["values"]
        assert values["loss"] == pytest.approx(values["criteria_loss"] + values["evidence_loss"], rel=1e-5)
    assert [line["split"] for line in lines].count("train") == 4


def test_an_exported_folder_has_its_tokenizer_and_gives_the_same_hidden_states(tmp_path):
    trained("criteria_tiny", tmp_path / "run", "train.epochs=1", "data.synthetic_posts=40")
    assert export.main(["--run", str(tmp_path / "run"), "--hf", str(tmp_path / "hf")]) == 0
    package = transformers()
    tokenizer = package.AutoTokenizer.from_pretrained(tmp_path / "hf")
    judge = package.AutoModel.from_pretrained(tmp_path / "hf").eval()
    given = tokenizer(["i feel sad today", "honestly"], padding=True, return_tensors="pt")
    with torch.no_grad():
        want = judge(**given).last_hidden_state.numpy()
    _, _, model, _ = run_dir.load_model(tmp_path / "run")
    got = model.encoder(**{key: jnp.asarray(value.numpy()) for key, value in given.items()}).hidden
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_study_of_the_tiny_criteria_finds_a_better_config_than_a_poor_start(tmp_path, capsys):
    """The repository's own space, four trials of it."""
    given = ["--config", str(CONFIGS / "criteria_tiny.yaml"), "--space", str(CONFIGS / "hpo" / "criteria_tiny.yaml")]
    small = ["train.epochs=2", "data.synthetic_posts=60", "optim.lr=1e-5", "shard.devices=1"]
    assert tune.main([*given, "--output", str(tmp_path / "study"), "--trials", "4", "--no-plots", *small]) == 0
    assert "training steps compiled: 1\n" in capsys.readouterr().out
    poor = trained("criteria_tiny", tmp_path / "poor", *small)
    best = max(t["value"] or 0 for t in json.loads((tmp_path / "study" / "trials_history.json").read_text()))
    assert best > poor.evaluate()["f1_macro"]
