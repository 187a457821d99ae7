"""The original's ProgressTracker and EarlyStopping."""

import time
from typing import Any

from jaxtrain.errors import UserError


class ProgressTracker:
    """Timer of steps and epochs that estimates the remaining time.

    Call start_epoch(), and step() after every step. step_times: seconds of the last 100 steps.
    """

    def __init__(self, total_epochs: int, steps_per_epoch: int):
        self.total_epochs, self.steps_per_epoch = total_epochs, steps_per_epoch
        self.total_steps = total_epochs * steps_per_epoch
        self.start_time = self.epoch_start_time = time.time()
        self.step_times: list[float] = []
        self._last = self.start_time

    def start_epoch(self) -> None:
        """Start an epoch's clock."""
        self.epoch_start_time = self._last = time.time()

    def step(self) -> None:
        """Count a step that has just ended."""
        now = time.time()
        self.step_times = [*self.step_times[-99:], now - self._last]
        self._last = now

    def end_epoch(self) -> float:
        """Return the seconds since the epoch began."""
        return time.time() - self.epoch_start_time

    def get_eta(self, current_epoch: int, current_step: int) -> str:
        """Return the time that remains after `current_step` steps of a 0-based epoch, as h:mm:ss; "N/A" without step().

        It takes the mean pace of the last 100 steps.
        """
        if not self.step_times:
            return "N/A"
        remaining = max(0, self.total_steps - current_epoch * self.steps_per_epoch - current_step)
        return self.format_time(remaining * sum(self.step_times) / len(self.step_times))

    def get_elapsed_time(self) -> str:
        """Return the time since the tracker was created, as h:mm:ss."""
        return self.format_time(time.time() - self.start_time)

    @staticmethod
    def format_time(seconds: float) -> str:
        """Format seconds as h:mm:ss."""
        minutes, rest = divmod(int(seconds), 60)
        return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


class EarlyStopping:
    """Stopping rule: call it with a metric after every epoch; it returns True when the run should stop.

    That is when `patience` epochs in a row were no better than the best by min_delta.
    """

    def __init__(self, patience: int = 10, min_delta: float = 0.0, mode: str = "min"):
        if mode not in ("min", "max"):
            raise UserError(f"mode={mode!r} is unknown; known: min, max")
        self.patience, self.min_delta, self.mode = patience, min_delta, mode
        self.reset()

    def __call__(self, metric: float) -> bool:
        metric = float(metric)
        if self.best_value is None or self._better(metric):
            self.best_value, self.counter = metric, 0
        else:
            self.counter += 1
        self.should_stop = self.counter >= self.patience
        return self.should_stop

    def _better(self, metric: float) -> bool:
        if self.mode == "min":
            return metric < self.best_value - self.min_delta
        return metric > self.best_value + self.min_delta

    def reset(self) -> None:
        """Clear the best score and the counter."""
        self.best_value: float | None = None
        self.counter = 0
        self.should_stop = False

    def state_dict(self) -> dict[str, Any]:
        return {"best_value": self.best_value, "counter": self.counter, "should_stop": self.should_stop}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # best_score: its name in files of version 0.9 and before
        self.__dict__.update({"best_value" if name == "best_score" else name: value for name, value in state.items()})
