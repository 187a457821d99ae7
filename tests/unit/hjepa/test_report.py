"""What a run shows in TensorBoard and what `jaxtrain.evaluate` writes."""

import json

import jax
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from jaxtrain import config_io, evaluate, run
from jaxtrain.systems.hjepa.evals import extraction, fine_tune, visualizations
from tests.unit.engine.test_tracking import events

pytestmark = pytest.mark.slow

TINY = "configs/hjepa_tiny.yaml"
SMALL = ("model.vit.depth=1", "train.steps=4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of four steps, whose best checkpoint is that of the best online probe."""
    place = tmp_path_factory.mktemp("run")
    best = ("evaluation.metric=probe_accuracy", "evaluation.mode=max", "evaluation.every_steps=2")
    settings = (f"run.dir={place}", "run.quiet=true", "checkpoint.every_steps=2", *SMALL, *best)
    assert run.main(["--config", TINY, *settings]) == 0
    return place


@pytest.mark.parametrize("name", ["masks", "attention", "neighbours"])
def test_tensorboard_shows_sheets_after_every_evaluation(folder, name):
    rows, columns = (7, 8) if name == "neighbours" else (2, 8)
    found = events(folder, f"validation/{name}")
    sizes = [(step, value.image.height, value.image.width) for step, value in found]
    assert sizes == [(step, 66 * rows, 66 * columns) for step in (2, 4)]


@pytest.mark.parametrize("encoder", ["target", "context"])
def test_tensorboard_shows_the_embeddings_as_histograms(folder, encoder):
    found = events(folder, f"validation/embeddings/{encoder}")
    assert [(step, sum(value.histo.bucket)) for step, value in found] == [(2, 64 * 24), (4, 64 * 24)]


def test_the_online_probe_decides_what_is_best(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seen = [line["values"]["probe_accuracy"] for line in lines if line["split"] == "validation"]
    best = json.loads((folder / "summary.json").read_text())["best"]
    assert best["probe_accuracy"] == max(seen)
    assert {"knn_accuracy", "effective_rank", "collapsed"} <= set(best)
    trained = next(line["values"] for line in lines if line["split"] == "train")
    assert 0.99 <= trained["ema_momentum"] < 1


def test_evaluate_writes_every_judge_the_baselines_and_the_pictures(folder, capsys):
    quick = ("probe.epochs=3", "probe.few_shot_episodes=5", "probe.folds=3", "probe.fine_tune_epochs=1")
    assert evaluate.main(["--run", str(folder), "probe.samples=200", *quick]) == 0
    found = json.loads((folder / "reports" / "evaluation_results.json").read_text())
    for entry in (found["level_0"], found["level_1"], *found["baselines"].values()):
        assert 0 <= entry["linear_probe"]["accuracy"] <= 100
        assert {"knn", "few_shot", "feature_quality"} <= set(entry)
    assert list(found["baselines"]) == ["random_encoder", "raw_pixels"]
    assert found["baselines"]["raw_pixels"]["feature_quality"]["rank"]["feature_dim"] == 64
    assert 0 <= found["k_fold"]["accuracy_mean"] <= 100
    assert found["fine_tune"]["encoder_moved"] > 0
    assert found["metadata"]["train_samples"] == 200
    said = capsys.readouterr()
    assert "raw_pixels: linear probe" in said.err
    files = json.loads(said.out)["files"]
    assert [Image.open(file).size for file in files if file.endswith("masks.png")] == [(528, 132)]
    assert len(files) == 4


def test_fine_tuning_trains_the_encoder_and_leaves_the_model_alone():
    config = config_io.load(TINY, [*SMALL, "probe.fine_tune_epochs=3", "probe.fine_tune_lr=0.01"])[1]
    frozen = config.model_copy(update={"probe": config.probe.model_copy(update={"fine_tune_encoder_lr_ratio": 0.0})})
    model = extraction.initial(config)
    before = jax.tree.map(np.asarray, nnx.state(model))
    train = extraction.columns(extraction.training_images(config), 256)
    found = fine_tune.fine_tune(model, train, train, config)
    assert found["train_loss"][-1] < found["train_loss"][0]
    assert found["encoder_moved"] > 0.01
    assert fine_tune.fine_tune(model, train, train, frozen)["encoder_moved"] == 0
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(model))


def test_samples_are_spread_over_the_whole_split():
    source = [{"image": np.zeros((1, 8, 8), np.uint8), "label": place} for place in range(10)]
    np.testing.assert_array_equal(extraction.columns(source, 4)["label"], [0, 2, 5, 7])


def test_a_query_stands_above_its_nearest_and_padding_is_nobodys_neighbour():
    images = np.stack([np.full((1, 64, 64), shade, np.float32) for shade in np.linspace(-1, 1, 10)])
    features = np.asarray([[np.cos(a), np.sin(a)] for a in np.linspace(0, 6, 10)], np.float32)
    valid = np.arange(10) != 1
    sheet = np.asarray(visualizations.neighbour_sheet(images, features, valid, neighbours=2))
    shades = sheet[::66, ::66, 0] * 9
    np.testing.assert_allclose(shades[0], np.arange(8), atol=1e-4)
    assert not (np.abs(shades[1:] - 1) < 0.1).any()
    np.testing.assert_allclose(sorted(shades[1:, 5]), [4, 6], atol=1e-4)
