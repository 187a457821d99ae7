"""Report of `jaxtrain.evaluate` on a pre-trained encoder: quality of frozen features, two baselines, pictures."""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.systems.hjepa import metrics
from jaxtrain.systems.hjepa.evals import visualizations
from jaxtrain.systems.hjepa.evals.extraction import columns, embedder, initial, pixels, training_images
from jaxtrain.systems.hjepa.evals.fine_tune import fine_tune
from jaxtrain.systems.hjepa.evals.knn import KNN, few_shot
from jaxtrain.systems.hjepa.evals.linear_probe import LinearProbe, k_fold
from torch_bridge.atomic_file import write_text

GALLERY = 1000  # images searched for the sheet of neighbours


def report(model, source, config, folder) -> list[pathlib.Path]:
    """Write evaluation_results.json and pictures, print the accuracies on stderr, and return the files' paths.

    For every hierarchy level: a linear probe and kNN from training to `source` features, few-shot accuracy and feature
    quality. `baselines`: the same for the encoder at initialisation and for raw pixels. `k_fold` and `fine_tune` are
    added if probe.folds and probe.fine_tune_epochs are set.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    splits = [columns(split, config.probe.samples) for split in (training_images(config), source)]
    embed = embedder(model, config)
    trained, untrained = (
        [embed(nnx.state(encoder), split["image"]) for split in splits] for encoder in (model, initial(config))
    )
    results: dict = {
        f"level_{level}": judge(*[rows[:, level] for rows in trained], splits, config.probe)
        for level in range(model.num_hierarchies)
    }
    results["baselines"] = {
        "random_encoder": judge(*[rows[:, 0] for rows in untrained], splits, config.probe),
        "raw_pixels": judge(*[pixels(split["image"], config) for split in splits], splits, config.probe),
    }
    if config.probe.folds and labelled(splits):
        results["k_fold"] = _folds(np.concatenate([rows[:, 0] for rows in trained]), splits, config)
    if config.probe.fine_tune_epochs and labelled(splits):
        results["fine_tune"] = fine_tune(model, *splits, config)
    results["metadata"] = {
        "dataset": config.data.dataset,
        "train_samples": len(splits[0]["label"]),
        "samples": len(splits[1]["label"]),
        "image_size": config.data.image_size,
        "probe": config.probe.model_dump(),
    }
    path = folder / "evaluation_results.json"
    write_text(path, json.dumps(results, indent=1))
    _say(results)
    return [path, *_sheets(model, splits[1], config, folder)]


def _folds(rows: np.ndarray, splits: list[dict], config) -> dict[str, float]:
    """Cross-validate the linear probe on features [sample, width] of all splits."""
    labels = np.concatenate([split["label"] for split in splits])
    rows = (rows - rows.mean(0)) / (rows.std(0) + 1e-6)
    probe = config.probe
    options = {"epochs": probe.epochs, "lr": probe.lr, "batch_size": probe.batch_size}
    return k_fold(rows, labels, int(labels.max()) + 1, probe.folds, config.seed, **options)


def _say(results: dict) -> None:
    for name, result in {**results, **results["baselines"]}.items():
        if "linear_probe" in result:
            probe, knn, rank = result["linear_probe"], result["knn"], result["feature_quality"]["rank"]
            print(
                f"{name}: linear probe {probe['accuracy']:.1f} %, kNN {knn['accuracy']:.1f} %, effective rank "
                f"{rank['effective_rank']:.1f} of {rank['feature_dim']}",
                file=sys.stderr,
            )


def labelled(splits: list[dict]) -> bool:
    """Return True if every sample has a class and there is more than one class."""
    return all((split["label"] >= 0).all() for split in splits) and len(np.unique(splits[0]["label"])) > 1


def judge(train: np.ndarray, test: np.ndarray, splits: list[dict], probe) -> dict:
    """Return the feature quality of `test` and, with labels, the probe, kNN and few-shot accuracies in percent."""
    results: dict = {"feature_quality": _plain(metrics.quality(test))}
    if not labelled(splits):
        return results
    labels = [split["label"] for split in splits]
    results["linear_probe"] = linear_probe(train, test, *labels, probe)
    knn = KNN(train, labels[0], probe.knn_k, temperature=probe.knn_temperature)
    results["knn"] = knn.evaluate(test, labels[1])
    ways = min(5, len(np.unique(labels[1])))
    results["few_shot"] = {
        f"{shots}_shot": few_shot(test, labels[1], ways, shots, episodes=probe.few_shot_episodes)
        for shots in probe.few_shot_shots
        if (np.bincount(labels[1]) > shots).sum() >= ways
    }
    return results


def linear_probe(train, test, train_labels, test_labels, probe) -> dict:
    """Fit and evaluate a LinearProbe on features standardised by the training set (which a linear layer can absorb)."""
    mean, deviation = train.mean(0), train.std(0) + 1e-6
    train, test = (train - mean) / deviation, (test - mean) / deviation
    classes = int(max(train_labels.max(), test_labels.max())) + 1
    model = LinearProbe(train.shape[1], classes, rngs=nnx.Rngs(0))
    model.fit(train, train_labels, epochs=probe.epochs, lr=probe.lr, batch_size=probe.batch_size)
    return model.evaluate(test, test_labels, top_k=(5,))


def _plain(value):
    """Convert numpy scalars to Python's, for JSON."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return value.item() if isinstance(value, np.generic) else value


def _sheets(model, split: dict, config, folder: pathlib.Path) -> list[pathlib.Path]:
    """Draw and save the pictures that training shows in the trackers, for the first images of the split."""
    shown = {name: jnp.asarray(column[:GALLERY]) for name, column in split.items()}
    count = len(shown["label"])
    batch = shown | {"index": jnp.arange(count), "valid": jnp.ones(count, bool)}
    definition, state = nnx.split(model)
    drawn = jax.jit(lambda state, batch: visualizations.sheets(nnx.merge(definition, state), batch, config))(
        state, batch
    )
    return [visualizations.save(sheet, folder / f"{name}.png") for name, sheet in drawn.items()]
