"""Metrics that two or more systems use, as additive statistics."""

import jax.numpy as jnp


def correct(logits, labels, valid):
    """How many valid rows have their label as the first maximum. logits: [batch, classes]; labels, valid: [batch]."""
    return jnp.where(valid, jnp.argmax(logits, axis=-1) == labels, False).sum().astype(jnp.float32)


def ratio(part, whole) -> float:
    """part / whole of two sums; 0 where there is nothing."""
    return float(part) / float(whole) if whole else 0.0


class WholeSplit:
    """A metric that needs a whole split, as scikit-learn's: `WholeSplit(lambda outputs, batch: f1_score(...))`.

    function: (outputs, batch) -> a number, or numbers by name. It gets numpy arrays of all samples; rows of several
    lengths are filled up with -100.
    """

    def __init__(self, function):
        self.function = function
