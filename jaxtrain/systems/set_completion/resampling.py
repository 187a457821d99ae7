"""Dead features get a second chance: they are pointed at activations that the autoencoder reconstructs badly."""

import jax
import jax.numpy as jnp

from jaxtrain.systems.set_completion.sae import SparseAutoencoder, dead_features

ROWS_PER_DEAD_FEATURE = 10
CHUNK = 1024  # rows reconstructed at a time: bounds the memory of a wide dictionary


def resample(
    sae: SparseAutoencoder, rows, count, key, *, threshold: float, weight: float, bias: float, target_usage: float
):
    """Replace the dead features of `sae` in place; bool [hidden_dim] of those replaced.

    rows: [row, input_dim], of which the first `count` are there; the first min(count, 10 x dead) of them are looked at.
    Every dead feature draws a row with probability proportional to its error and takes its direction.
    The caller zeroes the optimizer's moments of those encoder rows.
    """
    dead = dead_features(sae.usage_ema[...], threshold)
    looked_at = jnp.arange(rows.shape[0]) < jnp.minimum(count, ROWS_PER_DEAD_FEATURE * dead.sum())
    probabilities = row_probabilities(row_errors(sae, rows), looked_at)
    index = jax.random.categorical(key, jnp.log(probabilities), shape=(sae.hidden_dim,))
    replace(sae, dead, rows[index], threshold=threshold, weight=weight, bias=bias, target_usage=target_usage)
    return dead


def row_errors(sae: SparseAutoencoder, rows):
    """Mean squared error of each row's reconstruction, [row]."""
    return jax.lax.map(lambda row: jnp.square(sae(row[None])[0][0] - row).mean(), rows, batch_size=CHUNK)


def row_probabilities(errors, looked_at):
    """errors / sum over the rows looked at; even where that is no distribution. errors, looked_at: [row]."""
    errors = jnp.where(looked_at, errors, 0.0)
    total = errors.sum()
    even = looked_at / jnp.maximum(looked_at.sum(), 1)
    return jnp.where(jnp.isnan(total) | (total < 1e-12), even, errors / total)


def replace(sae: SparseAutoencoder, dead, rows, *, threshold: float, weight: float, bias: float, target_usage: float):
    """Point feature i, where dead[i], at rows[i]. dead: bool [hidden_dim]; rows: [hidden_dim, input_dim]."""
    directions = rows / jnp.maximum(jnp.linalg.norm(rows, axis=1, keepdims=True), 1e-12) * weight
    sae.encoder.weight.set_value(jnp.where(dead[:, None], directions, sae.encoder.weight[...]))
    sae.encoder.bias.set_value(jnp.where(dead, bias, sae.encoder.bias[...]))
    sae.decoder.weight.set_value(jnp.where(dead[None, :], directions.T, sae.decoder.weight[...]))
    usage = sae.usage_ema[...]
    alive = usage > threshold
    mean_alive = jnp.where(alive, usage, 0.0).sum() / jnp.maximum(alive.sum(), 1)
    sae.usage_ema.set_value(jnp.where(dead, jnp.where(alive.any(), mean_alive, target_usage), usage))
