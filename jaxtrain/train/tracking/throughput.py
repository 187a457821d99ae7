"""Measure the time that a run spends on steps, waiting for data, compiling, evaluating and saving."""

import contextlib
import time
from collections.abc import Iterator

import jax

from jaxtrain.train.compilation.flops import StepCost

PHASE = "jaxtrain phase: "  # prefix of a phase's name in a profiler trace


class Throughput:
    """Rates between two logged points, and the share of the run that was training.

    Time in `phase(...)` ("compile", "evaluation", "checkpoint") does not count as training. A step's metrics are read
    some calls after it was run, so a lap ends in the past: a phase counts in the lap that it fell in. resumed: when the
    last phase ended.
    """

    def __init__(self, step: int, work: StepCost):
        self.work = work
        self.seconds: dict[str, float] = {"compile": 0.0, "evaluation": 0.0, "checkpoint": 0.0}
        self.began = self.resumed = self._last = time.perf_counter()
        self._first_step = self._step = step
        self._last_stall = 0.0
        self._phases: list[tuple[str, float, float]] = []  # name, start, end of those after the last lap
        self._charged = dict.fromkeys(self.seconds, 0.0)  # seconds in phases before the last lap's end
        self._tokens = 0.0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            with jax.profiler.TraceAnnotation(PHASE + name):
                yield
        finally:
            self.resumed = time.perf_counter()
            self.seconds[name] += self.resumed - started
            self._phases.append((name, started, self.resumed))

    def add_tokens(self, tokens: float) -> None:
        self._tokens += tokens

    def lap(self, step: int, now: float, stall_s: float) -> dict[str, float]:
        """Return the rates since the last lap, and the seconds of the run so far. now: time at which `step` was done.
        stall_s: total seconds of waiting for data up to then."""
        elapsed = max(now - self._last - self._charge(now), 1e-9)
        steps, stall = step - self._step, max(0.0, stall_s - self._last_stall)
        values = {
            "samples_per_s": steps * self.work.samples / elapsed,
            "input_stall_ratio": min(1.0, stall / elapsed),
            "time/input_stall_s": stall_s,
            "time/checkpoint_s": self._charged["checkpoint"],
            "time/evaluation_s": self._charged["evaluation"],
            "time/compile_s": self._charged["compile"],
        }
        if self._tokens:
            values["throughput/tokens_per_s"] = self._tokens / elapsed
        if self.work.flops:
            rate = steps * self.work.flops / elapsed / self.work.devices
            values["throughput/tflops_per_device"] = rate / 1e12
            if self.work.peak:
                values["throughput/mfu"] = rate / self.work.peak
        self._last, self._step, self._last_stall, self._tokens = now, step, stall_s, 0.0
        total = now - self.began
        trained = total - sum(self._charged.values()) - stall_s
        values["time/goodput"] = max(0.0, trained) / max(total, 1e-9)  # training, without waiting for data
        return values

    def _charge(self, now: float) -> float:
        """Return the seconds of phases since the last lap's end; of one that goes on after `now`, those before."""
        away, later = 0.0, []
        for name, started, ended in self._phases:
            inside = max(0.0, min(ended, now) - started)
            self._charged[name] += inside
            away += inside
            if ended > now:
                later.append((name, max(started, now), ended))
        self._phases = later
        return away

    def samples_per_s(self, step: int) -> float:
        """Return the samples per second of training time over the whole run."""
        elapsed = time.perf_counter() - self.began - sum(self.seconds.values())
        return (step - self._first_step) * self.work.samples / max(elapsed, 1e-9)
