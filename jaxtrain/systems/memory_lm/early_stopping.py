"""The original's early stopping. The core's (`evaluation.min_delta`) measures against the best that counted."""

import dataclasses
import math


@dataclasses.dataclass
class EarlyStopping:
    """`best` moves on any decrease, also below the threshold, so that many small gains in a row stop a run although
    their sum exceeds it. NaN is no improvement."""

    patience: int = 5
    threshold: float = 0.0
    best: float = math.inf
    bad: int = 0

    def update(self, loss: float) -> tuple[bool, bool]:
        """Take in one evaluation: whether it is the best so far, and whether to stop."""
        is_best = loss < self.best
        self.bad = 0 if self.best - loss > self.threshold else self.bad + 1
        if is_best:
            self.best = loss
        return is_best, self.bad >= self.patience
