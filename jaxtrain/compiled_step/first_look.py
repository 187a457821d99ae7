"""Let torch run a first step, watched, where its code may reach what no graph can hold: that is known in seconds, and
by a capture only in minutes."""

import contextlib
from collections.abc import Iterator
from typing import Any

from jaxtrain.optim.torch_optimizer import OptaxUpdate


class FirstLook:
    """Knowledge of a step's loss before it is captured. Few modules are captured as fast as they are looked at."""

    def __init__(self, step: Any):
        from torch_bridge.lowering import foreseen

        weights = step.weights
        self._tensors = weights.tensors
        self._look: Any = foreseen.Look()
        self._errors = weights.bridge.errors
        looks = len(weights.submodules) >= foreseen.MANY and not weights.replicated
        if isinstance(step.updates, OptaxUpdate) or weights.rows is not None:  # torch cannot run such a step
            looks = False
        self.pending = looks and foreseen.reached([step.loss_fn], weights.submodules)

    @property
    def refusal(self) -> str:
        """Return what the watched step did that no graph can hold, with the line; "" if it did nothing such."""
        return f"{self._look.refusal} at {self._look.line}" if self._look.refusal else ""

    def ask(self) -> None:
        """Raise RunsOnceInTorch if a step is to be watched, CannotRecord if the watched one has shown why."""
        if self.pending:
            raise self._errors.RunsOnceInTorch("the first step runs in torch, as its code reaches other libraries")
        if self.refusal:
            raise self._errors.CannotRecord(self.refusal)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While active, torch runs a step; the pending one is watched."""
        if not self.pending:
            yield
            return
        self.pending = False
        with self._look.watching(self._tensors.values()):
            yield
