"""Measure the time that a run spends on steps, waiting for data, compiling, evaluating and saving."""

import contextlib
import time
from collections.abc import Iterator

import jax

from jaxtrain.train.compilation.flops import StepCost

PHASE = "jaxtrain phase: "  # prefix of a phase's name in a profiler trace


class Throughput:
    """Rates between two logged points, and the share of the run that was training.

    Time in `phase(...)` ("compile", "evaluation", "checkpoint") does not count as training.
    """

    def __init__(self, step: int, work: StepCost):
        self.work = work
        self.seconds: dict[str, float] = {"compile": 0.0, "evaluation": 0.0, "checkpoint": 0.0}
        self.began = self._last = time.perf_counter()
        self._first_step = self._step = step
        self._stall = self._last_stall = 0.0
        self._away = 0.0  # seconds in phases since the last lap
        self._tokens = 0.0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            with jax.profiler.TraceAnnotation(PHASE + name):
                yield
        finally:
            elapsed = time.perf_counter() - started
            self.seconds[name] += elapsed
            self._away += elapsed

    def add_tokens(self, tokens: float) -> None:
        self._tokens += tokens

    def lap(self, step: int, now: float, stall_s: float) -> dict[str, float]:
        """Return the rates since the last lap. now: time at which `step` was done. stall_s: total seconds of waiting
        for data."""
        elapsed = max(now - self._last - self._away, 1e-9)
        steps, stall = step - self._step, max(0.0, stall_s - self._last_stall)
        values = {
            "samples_per_s": steps * self.work.samples / elapsed,
            "input_stall_ratio": min(1.0, stall / elapsed),
            "time/input_stall_s": stall_s,
            "time/checkpoint_s": self.seconds["checkpoint"],
            "time/evaluation_s": self.seconds["evaluation"],
            "time/compile_s": self.seconds["compile"],
        }
        if self._tokens:
            values["throughput/tokens_per_s"] = self._tokens / elapsed
        if self.work.flops:
            rate = steps * self.work.flops / elapsed / self.work.devices
            values["throughput/tflops_per_device"] = rate / 1e12
            if self.work.peak:
                values["throughput/mfu"] = rate / self.work.peak
        self._last, self._step, self._away, self._tokens = now, step, 0.0, 0.0
        self._stall = self._last_stall = stall_s
        values["time/goodput"] = self.goodput()
        return values

    def goodput(self) -> float:
        """Return the training time, without waiting for data, as a share of the time since the run began."""
        total = time.perf_counter() - self.began
        return max(0.0, total - sum(self.seconds.values()) - self._stall) / max(total, 1e-9)

    def samples_per_s(self, step: int) -> float:
        """Return the samples per second of training time over the whole run."""
        elapsed = time.perf_counter() - self.began - sum(self.seconds.values())
        return (step - self._first_step) * self.work.samples / max(elapsed, 1e-9)
