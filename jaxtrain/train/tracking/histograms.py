"""Histograms of parameters and gradients, every `every_steps` steps, for the trackers that show them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.train.program import Program
from jaxtrain.train.step.train_step import gather_parts, make_gradients
from jaxtrain.train.tracking.tracker import Tracker

BINS = 64


class Histograms:
    """Logger of histograms. every_steps: None switches it off; then nothing is compiled.

    The gradients of a logged step are computed a second time, by a separate program: the same batch and random keys
    give the same gradients, and the training step needs no change.
    """

    def __init__(self, program: Program, every_steps: int | None):
        self.program, self.every_steps = program, every_steps
        self._programs: dict[bool, Any] = {}

    def log(self, first: int, count: int, batch: Any, columns: Any, tracker: Tracker) -> None:
        """Log histograms before the call that runs steps `first` to `first + count`, if the first of them is due."""
        if self.every_steps is None or first % self.every_steps:
            return
        several = count > 1
        if several not in self._programs:
            self._programs[several] = self._program(several)
        for name, (counts, low, high) in jax.device_get(
            self._programs[several](self.program.state, batch, columns, self.program.traced_hparams())
        ).items():
            tracker.histogram(first, name, np.asarray(counts), edges(low, high))

    def _program(self, several: bool):
        program = self.program
        gradients = make_gradients(program.task, program.resolved, program.model_def, program.precision, program.layout)

        def histograms(state, batch, columns, numbers):
            if several:
                batch = jax.tree.map(lambda leaf: leaf[0], batch)
            grads, *_ = gradients(state, gather_parts(batch, columns), numbers)
            named = {"parameters": state.params, "gradients": grads}
            return {f"{kind}/{key}": histogram(v) for kind, arrays in named.items() for key, v in arrays.items()}

        return program.jit(histograms, out_shardings=program.layout.replicated)


def histogram(values: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return counts, int32 [BINS], of equal bins between the smallest and the largest finite value, and these two."""
    values = values.astype(jnp.float32).ravel()
    finite = jnp.isfinite(values)
    low = jnp.min(jnp.where(finite, values, jnp.inf), initial=jnp.inf)
    high = jnp.max(jnp.where(finite, values, -jnp.inf), initial=-jnp.inf)
    low, high = jnp.where(low <= high, low, 0.0), jnp.where(low <= high, high, 0.0)
    high = jnp.where(high > low, high, low + 1e-6 + 1e-6 * jnp.abs(low))
    bins = jnp.clip(((values - low) / (high - low) * BINS).astype(jnp.int32), 0, BINS - 1)
    return jnp.zeros(BINS, jnp.int32).at[jnp.where(finite, bins, BINS)].add(1, mode="drop"), low, high


def edges(low: float, high: float) -> np.ndarray:
    """Return the bin edges [BINS + 1] from the bounds that `histogram` returns."""
    return np.linspace(low, high, BINS + 1)
