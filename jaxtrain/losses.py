"""Loss functions that two or more systems use. All compute in float32."""

import jax.numpy as jnp
from jax.nn import log_softmax

from jaxtrain.nn.rows import pick


def cross_entropy(logits, labels, valid):
    """Mean negative log-likelihood in nats over the valid rows, and their number.

    logits: float [..., classes]; labels: int [...]; valid: bool [...]. No valid row gives (0, 0).
    Source: torch.nn.functional.cross_entropy.
    """
    labels = jnp.where(valid, labels, 0)
    picked = pick(log_softmax(logits.astype(jnp.float32)), labels)
    return weighted_mean(-picked, valid)


def weighted_mean(values, weight):
    """sum(values * weight) / sum(weight) and sum(weight); (0, 0) where nothing counts. values, weight: [...]."""
    weight = jnp.asarray(weight, jnp.float32)
    total = weight.sum()
    masked = jnp.where(weight > 0, values.astype(jnp.float32), 0.0)
    # No division by a tiny number: where XLA knows it, it multiplies by a reciprocal that may overflow, 0 x inf.
    return (masked * weight).sum() / jnp.where(total > 0, total, 1.0), total
