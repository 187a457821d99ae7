"""Early stopping on a validation loss, by the rule of the original's README and by that of its code."""

import dataclasses
import math


@dataclasses.dataclass
class EarlyStopping:
    """Early stopping after `patience` losses without improvement; `check(loss)` follows the README, a call the code.

    patience: number of validations. min_delta (`delta` in the original's code): smallest improvement that counts. An
    equal loss is an improvement for a call but not for `check`; NaN is none. tie_is_improvement: follow the code
    exactly, which takes NaN as a new best. best_score: the negated best loss, None before the first. A run of the
    trainer uses `evaluation.patience` and `evaluation.min_delta` instead.
    """

    patience: int = 7
    min_delta: float = 0.0
    best_loss: float = float("inf")
    counter: int = 0
    tie_is_improvement: bool = False
    early_stop: bool = False
    best_score: float | None = None
    _seen: bool = dataclasses.field(default=False, repr=False)
    delta: dataclasses.InitVar[float | None] = None

    def __post_init__(self, delta: float | None) -> None:
        if isinstance(delta, (int, float)):
            self.min_delta = delta

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
        tie = self._seen and val_loss == self.best_loss - self.min_delta
        return self._take_in(val_loss, tie or self._improves(val_loss))

    def _improves(self, loss: float) -> bool:
        if self.tie_is_improvement:
            # The original's comparison of scores: with NaN it is False, so NaN counts as an improvement.
            return not self._seen or not (-loss < -self.best_loss + self.min_delta)
        return not math.isnan(loss) and loss < self.best_loss - self.min_delta


# The original code's name of min_delta. Set after the class: inside, it would become the default of the argument.
EarlyStopping.delta = property(  # type: ignore[assignment]
    lambda self: self.min_delta, lambda self, delta: setattr(self, "min_delta", delta)
)
