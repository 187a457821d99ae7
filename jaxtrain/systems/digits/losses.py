"""Loss and metrics of the digits task."""

import jax
import jax.numpy as jnp

from jaxtrain.losses import cross_entropy
from jaxtrain.metrics import correct, ratio
from jaxtrain.task import Loss, Statistics


def loss(model, batch, config, rngs) -> Loss:
    """Cross-entropy in nats per digit. Training images are shifted at random, on the device."""
    image = batch["image"] if rngs is None else shifted(batch["image"], config.model.shift, rngs())
    logits = model(image, rngs=rngs)
    value, weight = cross_entropy(logits, batch["label"], batch["valid"])
    return Loss(value, weight)


def shifted(image, most: int, key):
    """Every image of [batch, channel, height, width] moved by up to `most` pixels, filled with 0."""
    height, width = image.shape[-2:]
    padded = jnp.pad(image, ((0, 0), (0, 0), (most, most), (most, most)))
    offsets = jax.random.randint(key, (len(image), 2), 0, 2 * most + 1)
    cut = lambda one, at: jax.lax.dynamic_slice(one, (0, at[0], at[1]), (one.shape[0], height, width))
    return jax.vmap(cut)(padded, offsets)


def outputs(model, batch):
    """logits [batch, 10]."""
    return model(batch["image"])


def statistics(logits, batch, config) -> Statistics:
    return Statistics(sums={"correct": correct(logits, batch["label"], batch["valid"]), "count": batch["valid"].sum()})


def finish(sums, rows, config) -> dict[str, float]:
    return {"accuracy": ratio(sums["correct"], sums["count"])}
