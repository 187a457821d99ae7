"""Learning-rate range test over a trainer's own steps."""

import math
from collections.abc import Callable, Iterable
from typing import Any

from jaxtrain.errors import UserError

LEAST_LOSSES, DIVERGED = 3, 4.0  # the test ends at a loss above this multiple of the largest of the first ones


def range_test(
    step: Callable[[Any], float], optimizer: Any, batches: Iterable, min_lr: float, max_lr: float, num_steps: int
) -> list[dict[str, float]]:
    """Take a step on each batch, the i-th at min_lr * (max_lr / min_lr)^(i / num_steps); return rates and losses.

    step: trains on a batch and returns its loss. Raises UserError for an empty range.
    """
    if not 0 < min_lr < max_lr:
        raise UserError(f"the learning rates go from {min_lr} to {max_lr}; wanted 0 < min_lr < max_lr")
    history: list[dict[str, float]] = []
    for index, batch in enumerate(batches):
        rate = min_lr * (max_lr / min_lr) ** (index / num_steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = step(batch)
        history.append({"lr": rate, "loss": loss})
        first = [entry["loss"] for entry in history[:LEAST_LOSSES]]
        if not math.isfinite(loss) or (index >= LEAST_LOSSES and loss > DIVERGED * max(first)):
            break
    return history
