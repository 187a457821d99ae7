"""`jaxtrain.evaluate` on a pre-trained encoder: what frozen features are worth, two baselines, pictures."""

import json
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.systems.hjepa import device_images, features
from jaxtrain.systems.hjepa.data import build_data
from jaxtrain.systems.hjepa.knn import KNN, few_shot, unit
from jaxtrain.systems.hjepa.linear_probe import LinearProbe
from jaxtrain.systems.hjepa.pictures import attention_sheet, mask_sheet, neighbour_sheet, save
from jaxtrain.systems.hjepa.task import build_model, collate, inputs_of

BATCH = 128


def report(model, source, config, folder) -> list[pathlib.Path]:
    """Writes evaluation_results.json and pictures; gives their paths.

    For every hierarchy level: a linear probe and kNN from training to `source` features, few-shot accuracy and feature
    quality. `baselines`: the same probe on the encoder as it was initialised, and on raw pixels.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    train = build_data(config, "train")
    untrained = initial(config)
    splits = [columns(train), columns(source)]
    results: dict = {}
    for level in range(model.num_hierarchies):
        results[f"level_{level}"] = judge(
            *[embed(model, c["image"], config, level) for c in splits], splits, config.probe
        )
    results["baselines"] = {
        "random_encoder": judge(*[embed(untrained, c["image"], config, 0) for c in splits], splits, config.probe),
        "raw_pixels": judge(*[pixels(c["image"], config) for c in splits], splits, config.probe),
    }
    results["metadata"] = {
        "dataset": config.data.dataset,
        "train_samples": len(splits[0]["label"]),
        "samples": len(splits[1]["label"]),
        "image_size": config.data.image_size,
        "probe": config.probe.model_dump(),
    }
    path = folder / "evaluation_results.json"
    path.write_text(json.dumps(results, indent=1))
    return [path, *_pictures(model, splits[1], config, folder)]


def initial(config):
    """The model as a run of this config starts."""
    build = lambda: build_model(config, nnx.Rngs(config.seed))
    return nnx.merge(nnx.graphdef(nnx.eval_shape(build)), jax.jit(lambda: nnx.state(build()))())


def columns(source, most: int = 50_000) -> dict[str, np.ndarray]:
    """The first `most` items of a source as arrays; label -1 where it has none."""
    count = min(len(source), most)
    parts = [collate([source[i] for i in range(start, min(start + 1024, count))]) for start in range(0, count, 1024)]
    found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return {"label": np.full(count, -1), **found}


def embed(model, images: np.ndarray, config, level: int) -> np.ndarray:
    """Pooled target features of a level, float32 [sample, width]."""
    definition, state = nnx.split(model)

    def call(state, batch):
        prepared = device_images.prepare(batch, config.data.image_size)
        return nnx.merge(definition, state).extract_features(prepared, level).mean(1)

    return in_batches(jax.jit(call), state, images)


def in_batches(call: Callable, state, images: np.ndarray) -> np.ndarray:
    """call(state, [BATCH, ...]) over all images; the last batch is filled up, so that it compiles once."""
    found = []
    for start in range(0, len(images), BATCH):
        part = images[start : start + BATCH]
        filled = np.concatenate([part, np.repeat(part[:1], BATCH - len(part), axis=0)])
        found.append(np.asarray(call(state, filled))[: len(part)])
    return np.concatenate(found)


def pixels(images: np.ndarray, config) -> np.ndarray:
    """Images as the encoder takes them, flattened."""
    call = jax.jit(lambda _, batch: device_images.prepare(batch, config.data.image_size).reshape(len(batch), -1))
    return in_batches(call, None, images)


def judge(train: np.ndarray, test: np.ndarray, splits: list[dict], probe) -> dict:
    """Feature quality of `test`, and with labels the probe, kNN and few-shot accuracies in percent."""
    found: dict = {"feature_quality": _plain(features.quality(test))}
    labels = [np.asarray(split["label"]) for split in splits]
    if any((label < 0).any() for label in labels) or len(np.unique(labels[0])) < 2:
        return found
    found["linear_probe"] = linear_probe(train, test, *labels, probe)
    knn = KNN(train, labels[0], probe.knn_k, temperature=probe.knn_temperature)
    found["knn"] = knn.evaluate(test, labels[1])
    ways = min(5, len(np.unique(labels[1])))
    found["few_shot"] = {
        f"{shots}_shot": few_shot(test, labels[1], ways, shots, episodes=probe.few_shot_episodes)
        for shots in probe.few_shot_shots
        if (np.bincount(labels[1]) > shots).sum() >= ways
    }
    return found


def linear_probe(train, test, train_labels, test_labels, probe) -> dict:
    """A LinearProbe on features standardised by the training set's statistics (which a linear layer can absorb)."""
    mean, deviation = train.mean(0), train.std(0) + 1e-6
    train, test = (train - mean) / deviation, (test - mean) / deviation
    classes = int(max(train_labels.max(), test_labels.max())) + 1
    model = LinearProbe(train.shape[1], classes, rngs=nnx.Rngs(0))
    model.fit(train, train_labels, epochs=probe.epochs, lr=probe.lr, batch_size=probe.batch_size)
    return model.evaluate(test, test_labels, top_k=(5,))


def _plain(value):
    """numpy scalars as Python's, for JSON."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return value.item() if isinstance(value, np.generic) else value


def _pictures(model, split: dict, config, folder: pathlib.Path) -> list[pathlib.Path]:
    shown = split["image"][:8]
    batch = {"image": jnp.asarray(shown), "index": jnp.arange(len(shown)), "valid": jnp.ones(len(shown), bool)}
    if "mask" in split:
        batch["mask"] = jnp.asarray(split["mask"][:8])
    images, mask, _ = inputs_of(model, batch, config, None)
    grid = model.context_encoder.vit.grid
    tokens = np.asarray(model.encode_target(images))
    attention = (unit(tokens[:, 1:]) @ unit(tokens[:, :1]).transpose(0, 2, 1))[..., 0]
    found = embed(model, split["image"][:1000], config, 0)
    return [
        save(mask_sheet(np.asarray(images), np.asarray(mask).reshape(-1, grid, grid)), folder / "masks.png"),
        save(attention_sheet(np.asarray(images), attention.reshape(-1, grid, grid)), folder / "attention.png"),
        save(neighbour_sheet(split["image"][:1000], found), folder / "neighbours.png"),
    ]
