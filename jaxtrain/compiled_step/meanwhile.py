"""Calls of a compiled step that torch runs because nobody waits for a program: while XLA compiles it, and before it is
captured, as long as torch has not computed for as long as that takes."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxtrain.compiled_step.torch_updates import TorchUpdates
from jaxtrain.runtime.background import Compilation

CAPTURE_S, MODULE_S = 3.0, 0.05  # what a first capture takes: with the import of torch's compiler, and per module


class Meanwhile:
    """Calls that torch runs, with the weights, optimizer, scheduler and waiting gradients of a CompiledStep.

    As in a program, random numbers come of the step's key and count, and torch's generator stays as it is. pending: the
    program that a call has asked for; torch runs all calls until it is there, as changing sides costs a copy of weights
    and moments.
    """

    def __init__(self, step: Any):
        self._step = step
        self.pending: Compilation | None = None
        self._patience_s = CAPTURE_S + MODULE_S * len(step.weights.submodules)
        self._calls: Counter[Any] = Counter()  # by shapes: how many torch has run
        self._fastest_s: dict[Any, float] = {}  # by shapes: of these
        self._captured: set[Any] = set()  # shapes with which the loss has been captured, or a graph was there

    @property
    def why(self) -> str:
        """Return why torch runs the calls now; "" if it does not."""
        if self.pending is not None:
            return "XLA compiles the program"
        early = self._calls and not self._captured
        return f"its first {self._patience_s:.0f} s, about what a capture takes" if early else ""

    def runs(self, batch: Any) -> bool:
        """Return True if torch is to run this call. Raises what the compiler has raised."""
        step = self._step
        if step.capture.must_wait:
            self.pending = None
            return False
        if self.pending is None:
            shapes = step.weights.bridge.shapes_of(batch)
            spent_s = self._calls[shapes] * self._fastest_s.get(shapes, 0.0)  # a first call imports and allocates
            return shapes not in self._captured and spent_s < self._patience_s
        if self._moved() or self.pending.done():
            self.pending = None
        return self.pending is not None

    @contextlib.contextmanager
    def capturing(self, batch: Any) -> Iterator[None]:
        """Around a call that may be captured: shapes that come later have as much patience as it takes."""
        shapes, began = self._step.weights.bridge.shapes_of(batch), time.perf_counter()
        new = shapes not in self._captured
        try:
            yield
        finally:
            self._captured.add(shapes)
            if new:
                self._patience_s = time.perf_counter() - began

    def __call__(self, batch: Any, update: bool | None) -> Any:
        """Run a call in torch; return its result. Raises torch's own error if batch, module or loss are at fault."""
        from torch_bridge.capture.meanwhile import drawing_from, one_core_less

        step = self._step
        if self._moved():
            with step.weights.exchange.plainly():
                step.refresh()
        shapes, waiting = step.weights.bridge.shapes_of(batch), step.grads
        updates = TorchUpdates(step)
        began = time.perf_counter()
        try:
            with contextlib.nullcontext() if self.pending is None else one_core_less(), drawing_from(self._seed()):
                result = updates(batch, update)
            waiting = step.weights.placed(updates.gradients())
        finally:
            updates.set_gradients({})
            step.grads = waiting
        took_s = time.perf_counter() - began
        self._calls[shapes] += 1
        self._fastest_s[shapes] = min(took_s, self._fastest_s.get(shapes, took_s))
        step.torch_s = self._fastest_s[shapes]
        return result

    def _moved(self) -> bool:
        """Return True if modules or optimizer hold other parameters than before."""
        return self._step.weights.tables.changed() or self._step.updates.regrouped()

    def _seed(self) -> int:
        step = self._step
        key = np.asarray(jax.random.key_data(step.key)).tolist()
        return int(np.random.SeedSequence((*key, step.count)).generate_state(1)[0])
