"""Learning-rate range test: raise the rate exponentially for some steps and record the loss.

Source: Smith 2017, "Cyclical learning rates for training neural networks", sec. 3.3.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.runtime import host_memory
from jaxtrain.train.compilation.compiled import Compiled
from jaxtrain.train.program import Program
from jaxtrain.train.step.train_step import make_train_step, repeat

SMOOTHING = 0.8  # decay of the loss's exponential average, whose slope is used
DIVERGED = 4.0  # a loss above this multiple of the largest of the first losses ends the test
LEAST = 3  # fewest losses that show a slope


@dataclasses.dataclass(frozen=True)
class RangeTest:
    """Result of the test. lr, loss: one per step; the loss is that before the step's update. stopped: "diverged",
    "not finite" or "finished"."""

    lr: list[float]
    loss: list[float]
    stopped: str

    @property
    def smoothed(self) -> list[float]:
        """Return the exponential average of the loss, bias-corrected."""
        mean, values = 0.0, []
        for i, loss in enumerate(self.loss):
            mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
            values.append(mean / (1 - SMOOTHING ** (i + 1)))
        return values

    @property
    def minimum(self) -> int:
        """Return the index of the lowest smoothed loss."""
        return int(np.argmin(self.smoothed))

    @property
    def steepest(self) -> float:
        """Return the rate at which the smoothed loss falls fastest over the log of the rate, up to its minimum."""
        last = max(self.minimum, 1)
        slope = np.gradient(np.array(self.smoothed[: last + 1]), np.log(self.lr[: last + 1]))
        return self.lr[int(np.argmin(slope))]

    @property
    def minimum_tenth(self) -> float:
        """Return a tenth of the rate at the lowest loss, a cautious choice."""
        return self.lr[self.minimum] / 10

    def document(self) -> dict[str, Any]:
        """Return the content of `lr_find.json`."""
        return {
            "suggestion": {"steepest": self.steepest, "minimum_tenth": self.minimum_tenth},
            "stopped": self.stopped,
            "lr": self.lr,
            "loss": self.loss,
            "smoothed": self.smoothed,
        }


@host_memory.kept()
def range_test(
    program: Program, min_lr: float = 1e-7, max_lr: float = 1.0, steps: int = 100, clip: bool = True
) -> RangeTest:
    """Run the test on a copy of the program's state; weights, optimizer, schedule and data position are unchanged.

    Step i trains every parameter group at min_lr * (max_lr / min_lr)^(i / steps). It ends early when a loss exceeds
    four times the largest of the first three, or is not finite. clip: keep `optim.clip_norm`. Raises UserError for an
    empty range, too few steps, or the user's own optimizer.
    """
    if not 0 < min_lr < max_lr:
        raise UserError(f"the learning rates go from {min_lr} to {max_lr}; wanted 0 < min_lr < max_lr")
    if program.given is not None:
        raise UserError("the range test sweeps optim.lr, and the optimizer that was given has its own rates")
    if steps < LEAST:
        raise UserError(f"{steps} steps are too few to see a slope; take at least {LEAST}")
    rates = [min_lr * (max_lr / min_lr) ** (i / steps) for i in range(steps)]
    step, state, hyper = _compiled(program, clip), _copy(program), _hyper(program, rates)
    columns = program.columns(program.train_loader)
    losses: list[float] = []
    stopped = "finished"
    for _, _, batch in program.train_loader.batches((index, 1) for index in range(steps)):
        state, metrics = step(state, batch, hyper, columns)
        loss = float(metrics["loss"])
        if not math.isfinite(loss):
            stopped = "not finite"
            break
        losses.append(loss)
        if len(losses) >= LEAST and loss > DIVERGED * max(
            losses[:LEAST]
        ):  # batches differ where nothing is learned yet
            stopped = "diverged"
            break
    if stopped == "not finite" and len(losses) < LEAST:
        raise UserError(f"the loss was not finite after {len(losses)} steps; start from a lower rate than {min_lr:g}")
    return RangeTest(rates[: len(losses)], losses, stopped)


def set_lr(program: Program, known: float | None, say: Callable[[str], None]) -> None:
    """Set the peak rate for `optim.lr: auto`: `known` if a resumed run has found it before, else by a range test."""
    if known is None:
        found = range_test(program)
        known = found.steepest
        say(
            f"optim.lr: auto is {known:.3g}, where the loss fell fastest in {len(found.lr)} steps from "
            f"{found.lr[0]:.1e} to {found.lr[-1]:.1e}"
        )
    program.set_lr(known)


def _compiled(program: Program, clip: bool) -> Compiled:
    resolved = program.resolved
    train = resolved.train.model_copy(update={"nan_policy": "ignore", "spike_factor": None})
    config = resolved.model_copy(update={"train": train})
    optimizer = program.optimizer if clip else dataclasses.replace(program.optimizer, clip_norm=None)
    step = make_train_step(
        program.task, config, program.model_def, optimizer, program.precision, program.layout, program.resting(0)
    )
    jitted = program.jit(
        repeat(step, 1), donate_argnums=0, out_shardings=(program.start.shardings, program.layout.replicated)
    )
    return Compiled(jitted, "the range test's step", batch=1, shapes=program.train_shapes)


def _copy(program: Program) -> Any:
    """Return a copy of the state, at update 0, where the table of rates starts."""
    copy = lambda leaf: jax.device_put(jnp.copy(leaf), leaf.sharding)
    state = jax.tree.map(copy, program.state)
    return state.replace(updates=jnp.zeros_like(state.updates))


def _hyper(program: Program, rates: list[float]) -> dict:
    hyper = program.hyper()
    put = lambda value: jax.device_put(np.asarray(value, np.float32), program.layout.replicated)
    return {**hyper, "factor": put(rates), "lr_scale": put(1), "lr": {name: put(1) for name in hyper["lr"]}}
