"""The original's ProgressTracker and EarlyStopping."""

import time
from typing import Any

from jaxtrain.errors import UserError


class ProgressTracker:
    """Timer of steps and epochs that estimates the remaining time.

    Call start_epoch(e), step() after every step, end_epoch(metrics). `get_eta()` is "1:02:03"; before any step, "N/A".
    """

    def __init__(self, total_epochs: int, steps_per_epoch: int):
        self.total_epochs, self.steps_per_epoch = total_epochs, steps_per_epoch
        self.total_steps = total_epochs * steps_per_epoch
        self.current_epoch = self.current_step = 0
        self.start_time = self.epoch_start_time = time.time()
        self.step_times: list[float] = []
        self.epoch_times: list[float] = []
        self._last = self.start_time

    def start_epoch(self, epoch: int) -> None:
        """Start the 0-based epoch."""
        self.current_epoch, self.current_step = epoch, 0
        self.epoch_start_time = self._last = time.time()

    def step(self) -> None:
        """Count a step that has just ended."""
        now = time.time()
        self.step_times = [*self.step_times[-99:], now - self._last]
        self.current_step += 1
        self._last = now

    def end_epoch(self, metrics: dict[str, Any] | None = None) -> float:
        """End the epoch; return its duration in seconds."""
        seconds = time.time() - self.epoch_start_time
        self.epoch_times.append(seconds)
        return seconds

    def get_epoch_time(self) -> float:
        """Return the seconds since the epoch began."""
        return time.time() - self.epoch_start_time

    def get_total_time(self) -> float:
        """Return the seconds since the tracker was created."""
        return time.time() - self.start_time

    @property
    def remaining_steps(self) -> int:
        return max(0, self.total_steps - self.current_epoch * self.steps_per_epoch - self.current_step)

    def get_eta_seconds(self) -> float | None:
        """Return the remaining seconds at the mean pace of the last 100 steps; None before any step."""
        if not self.step_times:
            return None
        return self.remaining_steps * sum(self.step_times) / len(self.step_times)

    def get_eta(self) -> str:
        """Return the remaining time as text."""
        seconds = self.get_eta_seconds()
        return "N/A" if seconds is None else self.format_time(seconds)

    def get_progress(self) -> float:
        """Return the share of all steps that are done, in [0, 1]."""
        return 1.0 if self.total_steps == 0 else 1 - self.remaining_steps / self.total_steps

    def get_summary(self) -> dict[str, Any]:
        """Return epoch, step, progress, times and ETA for printing."""
        return {
            "epoch": self.current_epoch,
            "step": self.current_step,
            "progress": self.get_progress(),
            "epoch_time": self.get_epoch_time(),
            "total_time": self.get_total_time(),
            "eta": self.get_eta(),
        }

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
        if self.best_score is None or self._better(metric):
            self.best_score, self.counter = metric, 0
        else:
            self.counter += 1
        self.should_stop = self.counter >= self.patience
        return self.should_stop

    def _better(self, metric: float) -> bool:
        if self.mode == "min":
            return metric < self.best_score - self.min_delta
        return metric > self.best_score + self.min_delta

    def reset(self) -> None:
        """Clear the best score and the counter."""
        self.best_score: float | None = None
        self.counter = 0
        self.should_stop = False

    def state_dict(self) -> dict[str, Any]:
        return {"best_score": self.best_score, "counter": self.counter, "should_stop": self.should_stop}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
