"""Early stopping on a validation loss, by the rule of the original's README and by that of its code."""

import math


class EarlyStopping:
    """Early stopping after `patience` losses without improvement; `check(loss)` follows the README, a call the code.

    patience: number of validations. delta (`min_delta` in the README): smallest improvement that counts. An equal loss
    is an improvement for a call but not for `check`; NaN is none. tie_is_improvement: follow the code exactly, which
    takes NaN as a new best. best_score: the negated best loss, None before the first. A run of the trainer uses
    `evaluation.patience` and `evaluation.min_delta` instead.
    """

    def __init__(
        self,
        patience: int = 7,
        delta: float = 0,
        *,
        min_delta: float | None = None,
        tie_is_improvement: bool = False,
    ):
        self.patience, self.delta = patience, delta if min_delta is None else min_delta
        self.tie_is_improvement = tie_is_improvement
        self.best_loss, self.best_score = math.inf, None
        self.counter, self.early_stop, self._seen = 0, False, False

    @property
    def min_delta(self) -> float:
        return self.delta

    @min_delta.setter
    def min_delta(self, delta: float) -> None:
        self.delta = delta

    def check(self, val_loss: float) -> bool:
        """Record one loss; return True if training should stop now."""
        return self._take_in(val_loss, self._improves(val_loss))

    def _take_in(self, val_loss: float, improves: bool) -> bool:
        if improves:
            self.best_loss, self.best_score, self.counter = val_loss, -val_loss, 0
        else:
            self.counter += 1
            self.early_stop = self.early_stop or self.counter >= self.patience
        self._seen = True
        return self.early_stop if self.tie_is_improvement else self.counter >= self.patience

    def __call__(self, val_loss: float) -> bool:
        tie = self._seen and val_loss == self.best_loss - self.delta
        return self._take_in(val_loss, tie or self._improves(val_loss))

    def _improves(self, loss: float) -> bool:
        if self.tie_is_improvement:
            # The original's comparison of scores: with NaN it is False, so NaN counts as an improvement.
            return not self._seen or not (-loss < -self.best_loss + self.delta)
        return not math.isnan(loss) and loss < self.best_loss - self.delta
