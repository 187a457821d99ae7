"""Which evaluation is the best so far, and when to stop."""

import dataclasses
import math


@dataclasses.dataclass
class EarlyStopping:
    """Follows one validation metric.

    best: the best value ever seen; decides the best checkpoint. reference: the last value that counted as progress,
    i.e. beat the reference before it by more than min_delta; patience counts evaluations since then. So many small
    gains together do count, and NaN never does.
    """

    metric: str
    mode: str
    min_delta: float = 0.0
    patience: int | None = None
    best: float | None = None
    reference: float | None = None
    bad: int = 0

    def update(self, value: float) -> bool:
        """Take in one evaluation; True where it is the best so far."""
        is_best = self._beats(value, self.best, 0.0)
        if is_best:
            self.best = value
        if self._beats(value, self.reference, self.min_delta):
            self.reference, self.bad = value, 0
        else:
            self.bad += 1
        return is_best

    @property
    def stop(self) -> bool:
        return self.patience is not None and self.bad >= self.patience

    def _beats(self, value: float, other: float | None, margin: float) -> bool:
        if math.isnan(value):
            return False
        if other is None:
            return True
        return value < other - margin if self.mode == "min" else value > other + margin

    def state(self) -> dict:
        return {"best": self.best, "reference": self.reference, "bad": self.bad}

    def restore(self, state: dict) -> None:
        self.best, self.reference, self.bad = state["best"], state["reference"], state["bad"]
