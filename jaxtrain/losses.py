"""Loss functions that two or more systems use. All compute in float32."""

import jax.numpy as jnp
from jax.nn import log_softmax

from jaxtrain.nn.rows import pick


def cross_entropy(logits, labels, valid):
    """Return the mean negative log-likelihood in nats over the valid rows, and their number.

    logits: float [..., classes]; labels: int [...]; valid: bool [...]. Without a valid row it is (0, 0).
    Source: torch.nn.functional.cross_entropy.
    """
    labels = jnp.where(valid, labels, 0)
    picked = pick(log_softmax(logits.astype(jnp.float32)), labels)
    return weighted_mean(-picked, valid)


def weighted_mean(values, weight):
    """Return sum(values * weight) / sum(weight) and sum(weight); (0, 0) if all weights are 0. values, weight: [...]."""
    weight = jnp.asarray(weight, jnp.float32)
    total = weight.sum()
    masked = jnp.where(weight > 0, values.astype(jnp.float32), 0.0)
    # Don't divide by a tiny constant instead of 1: XLA multiplies by its reciprocal, which may overflow (0 x inf).
    return (masked * weight).sum() / jnp.where(total > 0, total, 1.0), total
