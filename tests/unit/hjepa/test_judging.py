"""kNN, probe, feature quality and collapse metrics against the original's recorded numbers."""

import json
import pathlib

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxtrain.systems.hjepa import metrics
from jaxtrain.systems.hjepa.config import ProbeConfig
from jaxtrain.systems.hjepa.evals.knn import KNN, few_shot
from jaxtrain.systems.hjepa.evals.linear_probe import LinearProbe, k_fold
from jaxtrain.systems.hjepa.metrics import CollapseWarning, after_evaluation, leave_one_out, ridge_folds
from tests.contract.tasks import tiny
from torch_bridge.state_dict import load_state_dict

pytestmark = pytest.mark.slow

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "hjepa"
CASES = json.loads((GOLDEN / "evaluation.json").read_text())["cases"]
TENSORS = load_file(GOLDEN / "evaluation.safetensors")
TRAIN, TEST = ((TENSORS[f"in/{s}_features"], TENSORS[f"in/{s}_labels"]) for s in ("train", "test"))


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("knn_")])
def test_knn_accuracies(name):
    case = CASES[name]
    knn = KNN(*TRAIN, normalize=case["normalize"], **case["kwargs"])
    assert knn.evaluate(*TEST, top_k=(1, 2)) == pytest.approx(case["metrics"])


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("probe_")])
def test_probe_history_and_metrics(name):
    case, prefix = CASES[name], f"param/{name}."
    probe = LinearProbe(TRAIN[0].shape[-1], 4, **case["probe_kwargs"], rngs=nnx.Rngs(0))
    load_state_dict(probe, {k.removeprefix(prefix): v for k, v in TENSORS.items() if k.startswith(prefix)})
    history = probe.fit(*TRAIN, batch_size=8, shuffle=False, validation=TEST, **case["train_kwargs"])
    for key, values in case["history"].items():
        assert history[key] == pytest.approx(values, rel=1e-5), key
    found, wanted = probe.evaluate(*TEST, top_k=(2,), batch_size=8), dict(case["metrics"])
    assert found.pop("confusion_matrix") == wanted.pop("confusion_matrix")
    assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(("name", "rows"), [("fq_train_mean", TRAIN[0]), ("fq_lowrank", TENSORS["in/fq_lowrank"])])
def test_feature_quality(name, rows):
    found = metrics.quality(rows)
    for group, values in CASES[name].items():
        for key, value in values.items():
            assert found[group][key] == pytest.approx(value, rel=1e-6, abs=1e-9), key


@pytest.mark.parametrize("name", CASES["collapse_metrics"])
def test_collapse_metrics(name):
    given = (TENSORS[f"in/collapse/{name}/{side}"] for side in ("context", "target"))
    assert metrics.collapse_metrics(*given) == pytest.approx(CASES["collapse_metrics"][name], rel=1e-5)


def test_features_that_are_all_alike_raise_the_collapse_warning():
    rows = np.ones((50, 16)) + 1e-4 * np.random.default_rng(0).normal(size=(50, 16))
    with pytest.warns(CollapseWarning, match="standard deviation over images"):
        found = after_evaluation(rows, np.full(50, -1), ProbeConfig())
    assert found["collapsed"] == 1.0


def test_features_on_a_line_raise_the_collapse_warning():
    rng = np.random.default_rng(0)
    with pytest.warns(CollapseWarning, match="effective rank 1"):
        after_evaluation(rng.normal(size=(50, 1)) * rng.normal(size=64), np.full(50, -1), ProbeConfig())


def test_a_live_target_without_a_regulariser_collapses_and_the_monitor_warns(tmp_path):
    live = ("model.use_target_encoder=false", "loss.detach_targets=false", "loss.normalize_embeddings=false")
    quick = ("model.vit.depth=1", "train.steps=60", "evaluation.every_epochs=null", "evaluation.every_steps=10")
    with pytest.warns(CollapseWarning, match="Use an EMA target"):
        tiny("hjepa.pretrain", tmp_path, *live, *quick, "checkpoint.every_epochs=null").train()
    lines = [json.loads(line)["values"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    flags = [line["collapsed"] for line in lines if "collapsed" in line]
    assert (flags[0], flags[-1]) == (0.0, 1.0)


def _blobs(classes=4, each=30, width=8):
    rng = np.random.default_rng(0)
    centres = 4 * rng.normal(size=(classes, width))
    labels = np.repeat(np.arange(classes), each)
    return (centres[labels] + rng.normal(size=(len(labels), width))).astype(np.float32), labels


def test_separable_classes_are_found_by_every_judge():
    rows, labels = _blobs()
    assert leave_one_out(rows, labels, ProbeConfig()) > 97
    assert ridge_folds(rows, labels) > 97
    assert few_shot(rows, labels, n_way=4, k_shot=5, episodes=20)["accuracy"] > 97
    assert k_fold(rows, labels, 4, folds=3, epochs=20, batch_size=40)["accuracy_mean"] > 97


def test_noise_is_judged_at_chance():
    rows, labels = np.random.default_rng(0).normal(size=(400, 8)), np.arange(400) % 4
    assert abs(leave_one_out(rows, labels, ProbeConfig()) - 25) < 10
    assert abs(ridge_folds(rows, labels) - 25) < 10
