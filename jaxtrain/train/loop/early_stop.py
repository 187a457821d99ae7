"""Track the best evaluation so far, and decide when to stop early."""

import dataclasses
import math


@dataclasses.dataclass
class EarlyStopping:
    """Early stopping on one validation metric.

    best: the best value so far; it decides the best checkpoint. reference: the last value that counted as progress,
    i.e. beat the previous reference by more than min_delta. bad: evaluations since then, limited by patience. So small
    gains can add up to progress; NaN never counts.
    """

    metric: str
    mode: str
    min_delta: float = 0.0
    patience: int | None = None
    best: float | None = None
    reference: float | None = None
    bad: int = 0

    def update(self, value: float) -> bool:
        """Record one evaluation; return True if it is the best so far."""
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
