"""Early stopping on a validation loss, by the README's rule and by that of the original's code."""

import dataclasses
import math


@dataclasses.dataclass
class EarlyStopping:
    """Stops after `patience` losses without improvement; `check(loss)`, as the README has it, or a call, as the code.

    patience: validations. min_delta, in the original's code delta: improvement over best_loss that counts. An equal
    loss is an improvement for a call and none for `check`; a NaN is none. tie_is_improvement: the code to the letter,
    which takes a NaN for a new best. A run of the trainer follows `evaluation.patience` and `evaluation.min_delta`
    instead. best_score: the best loss with its sign turned; None before the first.
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
        """Take in one loss; True where training should stop now."""
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
            # Written as the original compares scores, so that a NaN passes as an improvement.
            return not self._seen or not (-loss < -self.best_loss + self.min_delta)
        return not math.isnan(loss) and loss < self.best_loss - self.min_delta


# The code's name for min_delta. Set here, because in the class it would be the default of the argument.
EarlyStopping.delta = property(  # type: ignore[assignment]
    lambda self: self.min_delta, lambda self, delta: setattr(self, "min_delta", delta)
)
