"""Fine-tuning: a copy of the encoder and a classifier, trained together on labels."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxtrain.nn import Linear, Rngs
from jaxtrain.systems.hjepa import device_images
from jaxtrain.systems.hjepa.config import AugmentationConfig
from jaxtrain.systems.hjepa.evals.extraction import in_batches
from jaxtrain.systems.hjepa.evals.linear_probe import cross_entropy


class Classifier(nnx.Module):
    """Classifier: images [batch, channel, S, S] -> logits [batch, class], by a Linear on the mean patch token."""

    def __init__(self, encoder: nnx.Module, width: int, classes: int, *, rngs: nnx.Rngs):
        self.encoder = encoder
        self.head = Linear(width, classes, rngs=rngs)

    def __call__(self, images, rngs=None):
        return self.head(self.encoder(images, rngs=rngs)[:, 1:].mean(1))


def fine_tune(model, train: dict, test: dict, config) -> dict:
    """Train a copy of the target encoder and a classifier on `train`, augmented as in pre-training; evaluate on `test`.

    train, test: columns "image" and "label". AdamW with a cosine to 0 over the epochs; the encoder's rate is
    probe.fine_tune_encoder_lr_ratio times the classifier's. `model` is not changed. Returns the accuracy on `test` in
    percent, the mean cross-entropy of every epoch, and how far the encoder moved relative to its norm.
    """
    probe = config.probe
    encoder = nnx.clone(model.target_encoder or model.context_encoder)
    classes = int(max(train["label"].max(), test["label"].max())) + 1
    network = Classifier(encoder, encoder.vit.size.embed_dim, classes, rngs=nnx.Rngs(config.seed))
    definition, params = nnx.split(network)
    start = params
    optimizer, step = _step(definition, probe.fine_tune_weight_decay, config.data.augmentation, config.data.image_size)
    state, losses = optimizer.init(params), []
    for epoch in range(probe.fine_tune_epochs):
        rate = 0.5 * probe.fine_tune_lr * (1 + math.cos(math.pi * epoch / probe.fine_tune_epochs))
        history = []
        for number, rows in enumerate(_batches(len(train["label"]), probe.batch_size, [config.seed, epoch])):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), epoch), number)
            rates = {"encoder": probe.fine_tune_encoder_lr_ratio * rate, "head": rate}
            params, state, loss = step(params, state, train["image"][rows], train["label"][rows], key, rates)
            history.append(loss)
        losses.append(float(np.mean(jax.device_get(history))))
    return {
        "accuracy": _accuracy(definition, params, test, config),
        "train_loss": losses,
        "encoder_moved": _distance(start["encoder"], params["encoder"]),
    }


def _batches(samples: int, size: int, seed: list[int]):
    """Return the shuffled positions of an epoch in equal batches; the last one is filled up from the front."""
    order = np.random.default_rng(seed).permutation(samples)
    size = min(size, samples)
    return np.resize(order, -(-samples // size) * size).reshape(-1, size)


@functools.lru_cache(maxsize=2)
def _step(definition, weight_decay: float, augmentation: AugmentationConfig, image_size: int):
    """Return AdamW without its rate, and a function for one update with separate rates for encoder and head."""
    optimizer = optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(weight_decay))

    @jax.jit
    def step(params, state, images, labels, key, rates):
        crop_key, noise_key = jax.random.split(key)
        images = device_images.augment(
            images,
            jax.random.split(crop_key, len(images)),
            image_size,
            augmentation.crop_scale,
            augmentation.horizontal_flip,
            augmentation.color_jitter,
        )
        value = lambda params: cross_entropy(nnx.merge(definition, params)(images, Rngs(noise_key)), labels)
        loss, grads = jax.value_and_grad(value)(params)
        updates, state = optimizer.update(grads, state, params)
        move = lambda path, p, u: p - rates[path[0].key] * u
        return jax.tree_util.tree_map_with_path(move, params, updates), state, loss

    return optimizer, step


def _accuracy(definition, params, test: dict, config) -> float:
    call = lambda p, x: nnx.merge(definition, p)(device_images.prepare(x, config.data.image_size)).argmax(-1)
    return 100 * float((in_batches(jax.jit(call), params, test["image"]) == test["label"]).mean())


def _distance(before, after) -> float:
    """Return the distance between two states, relative to the norm of the first."""
    difference = jax.tree.map(jnp.subtract, after, before)
    return float(optax.tree.norm(difference) / optax.tree.norm(before))
