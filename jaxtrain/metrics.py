"""Metrics that two or more systems use, as additive statistics."""

import jax.numpy as jnp


def correct(logits, labels, valid):
    """How many valid rows have their label as the first maximum. logits: [batch, classes]; labels, valid: [batch]."""
    return jnp.where(valid, jnp.argmax(logits, axis=-1) == labels, False).sum().astype(jnp.float32)


def ratio(part, whole) -> float:
    """part / whole of two sums; 0 where there is nothing."""
    return float(part) / float(whole) if whole else 0.0
