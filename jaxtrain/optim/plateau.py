"""ReduceLROnPlateau with torch's exact rule, on the host; the compiled step gets the learning rate as a number."""

import dataclasses
import math


@dataclasses.dataclass
class Plateau:
    """Multiply the learning rate by `factor` after more than `patience` evaluations without improvement.

    threshold: relative; better means value < best * (1 - threshold) (mode min) or > best * (1 + threshold) (max).
    Source: torch.optim.lr_scheduler.ReduceLROnPlateau (threshold_mode "rel", cooldown 0, eps 1e-8). optax's rule acts
    one evaluation earlier.
    """

    lr: float
    factor: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    mode: str = "min"
    min_lr: float = 0.0
    eps: float = 1e-8
    best: float | None = None
    bad: int = 0

    def update(self, value: float) -> float:
        """Record one evaluation; return the learning rate from now on."""
        if self.best is None:
            self.best = math.inf if self.mode == "min" else -math.inf
        if self.mode == "min":
            better = value < self.best * (1 - self.threshold)
        else:
            better = value > self.best * (1 + self.threshold)
        if better:
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        if self.bad > self.patience:
            self.bad = 0
            lower = max(self.lr * self.factor, self.min_lr)
            if self.lr - lower > self.eps:
                self.lr = lower
        return self.lr

    def state(self) -> dict:
        return {"lr": self.lr, "best": self.best, "bad": self.bad}

    def restore(self, state: dict) -> None:
        self.lr, self.best, self.bad = state["lr"], state["best"], state["bad"]
