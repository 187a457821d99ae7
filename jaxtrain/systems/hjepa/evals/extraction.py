"""Arrays for the evaluations, extracted from a source of images: columns, frozen features, raw pixels."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.runtime.prng import initial_rngs
from jaxtrain.systems.hjepa import device_images
from jaxtrain.systems.hjepa.data import build_data
from jaxtrain.systems.hjepa.pretraining import build_model, collate

BATCH = 128
PIXELS = 32  # largest side of images in the raw-pixel baseline


def initial(config):
    """Return the model with the initial weights of a run of this config."""
    build = lambda: build_model(config, initial_rngs(config.seed))
    return nnx.merge(nnx.graphdef(nnx.eval_shape(build)), jax.jit(lambda: nnx.state(build()))())


def training_images(config):
    """Return the training split without the loader's augmentation and masks, to fit classifiers on."""
    augmentation = config.data.augmentation.model_copy(update={"where": "device"})
    data = config.data.model_copy(update={"augmentation": augmentation})
    masking = config.masking.model_copy(update={"where": "device"})
    return build_data(config.model_copy(update={"data": data, "masking": masking}), "train")


def columns(source, most: int) -> dict[str, np.ndarray]:
    """Return at most `most` items of a source, spread evenly over it, as arrays; label -1 if it has none."""
    count = min(len(source), most)
    places = np.arange(count) * len(source) // count
    parts = [collate([source[int(i)] for i in places[start : start + 1024]]) for start in range(0, count, 1024)]
    columns_by_name = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return {"label": np.full(count, -1), **columns_by_name}


def embedder(model, config) -> Callable:
    """Return a compiled (state, images) -> pooled target features of every level, float32 [sample, level, width].

    state: `nnx.state` of this model or of another one of its config.
    """
    definition, _ = nnx.split(model)

    def call(state, batch):
        prepared, model = device_images.prepare(batch, config.data.image_size), nnx.merge(definition, state)
        levels = [model.extract_features(prepared, level).mean(1) for level in range(model.num_hierarchies)]
        return jnp.stack(levels, axis=1)

    return functools.partial(in_batches, jax.jit(call))


def in_batches(call: Callable, state, images: np.ndarray) -> np.ndarray:
    """Return call(state, [BATCH, ...]) over all images; the last batch is filled up, so that `call` compiles once."""
    results = []
    for start in range(0, len(images), BATCH):
        part = images[start : start + BATCH]
        filled = np.concatenate([part, np.repeat(part[:1], BATCH - len(part), axis=0)])
        results.append(np.asarray(call(state, filled))[: len(part)])
    return np.concatenate(results)


def pixels(images: np.ndarray, config) -> np.ndarray:
    """Return flattened images as the encoder takes them, scaled down first if they exceed PIXELS per side."""

    def call(_, batch):
        prepared = device_images.prepare(batch, config.data.image_size)
        if prepared.shape[-1] > PIXELS:
            prepared = jax.image.resize(prepared, (*prepared.shape[:2], PIXELS, PIXELS), "linear")
        return prepared.reshape(len(prepared), -1)

    return in_batches(jax.jit(call), None, images)
