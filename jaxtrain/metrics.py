"""Metrics that two or more systems use, as additive statistics."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp


def correct(logits: Any, labels: Any, valid: Any) -> Any:
    """Count valid rows whose first largest logit is the label's. logits: [batch, classes]; labels, valid: [batch]."""
    return jnp.where(valid, jnp.argmax(logits, axis=-1) == labels, False).sum().astype(jnp.float32)


def ratio(part: Any, whole: Any) -> float:
    """Return part / whole of two sums; 0 if whole is 0."""
    return float(part) / float(whole) if whole else 0.0


class WholeSplit:
    """A metric over a whole split, such as scikit-learn's.

    Args:
        function: (outputs, batch) -> a number, or numbers by name. It receives numpy arrays of all samples; rows of
            different lengths are padded with -100.

    Examples:
        >>> from jaxtrain import WholeSplit
        >>> from sklearn.metrics import f1_score
        >>> metrics = {"f1": WholeSplit(lambda out, batch: f1_score(batch["1"], out.argmax(1), average="macro"))}
    """

    def __init__(self, function: Callable[[Any, Any], Any]):
        self.function = function
