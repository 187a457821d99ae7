"""The original's bookkeeping of an epoch's metrics, for scripts with a loop of their own."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def update_epoch_metrics(
    metrics: dict[str, float], y_true: Sequence[np.ndarray] | np.ndarray, y_pred: Sequence[np.ndarray] | np.ndarray
) -> dict[str, float]:
    """Write micro-averaged f1, precision and recall into `metrics` and return it; the other entries stay.

    y_true, y_pred: 0 or 1, [row, label], or a list of such arrays, one per batch. Where nothing was predicted or is
    true, the score is 0. Raises ValueError for different shapes.
    """
    truth, guess = (np.vstack([np.asarray(part) for part in parts]) > 0 for parts in (y_true, y_pred))
    if truth.shape != guess.shape:
        raise ValueError(f"y_true is {truth.shape}, y_pred {guess.shape}; wanted equal shapes")
    right, predicted, relevant = int((truth & guess).sum()), int(guess.sum()), int(truth.sum())
    share = lambda part, whole: part / whole if whole else 0.0
    metrics["precision"], metrics["recall"] = share(right, predicted), share(right, relevant)
    metrics["f1"] = share(2 * right, predicted + relevant)
    return metrics


def update_progress_bar(pbar: Any, metrics: Mapping[str, float], total_batches: int) -> None:
    """Show the mean loss of `total_batches` batches and the other metrics as they are in a tqdm bar."""
    shown = {name: value / max(1, total_batches) if name == "loss" else value for name, value in metrics.items()}
    pbar.set_postfix({name: f"{value:.4f}" for name, value in shown.items()})
