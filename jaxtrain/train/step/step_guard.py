"""Decide if a step's update is applied: dynamic loss scale of float16, NaN and infinity, spikes."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.runtime.precision import Precision
from jaxtrain.task import Loss
from jaxtrain.train.step.state import Arrays, TrainState

SCALE_GROWTH_STEPS = 2000  # torch GradScaler's growth_interval: then the scale doubles; an overflow halves it
SPIKE_MEMORY = 0.98  # decay of the running mean of the gradient norm
SPIKE_WARMUP_STEPS = 20  # updates before the mean is trusted


class GuardResult(NamedTuple):
    """Result of a step's check. finite: loss and gradients are finite, or need not be. skipped: the update is not
    applied. scale, guard: for the next step."""

    finite: jax.Array
    skipped: jax.Array
    scale: Arrays
    guard: Arrays


@dataclasses.dataclass(frozen=True)
class Guard:
    """Skip the updates of bad steps. A skipped step changes neither weights nor schedule, only the data position."""

    not_finite: bool
    spike_factor: float | None

    @classmethod
    def of(cls, config: Any, precision: Precision) -> "Guard":
        return cls(precision.scaled or config.train.nan_policy != "ignore", config.train.spike_factor)

    def check(self, state: TrainState, loss: Loss, norm: jax.Array) -> GuardResult:
        """Decide about a step's update. norm: of the unscaled gradients, before clipping."""
        finite = jnp.isfinite(norm) & jnp.isfinite(loss.value)
        skipped = ~finite if self.not_finite else jnp.bool_(False)
        guard = state.guard
        if self.spike_factor is not None:
            trusted = guard["count"] >= SPIKE_WARMUP_STEPS
            limit = self.spike_factor * guard["mean_norm"]
            skipped = skipped | (trusted & (norm > limit))
            guard = _follow(guard, jnp.where(trusted, jnp.minimum(norm, limit), norm), finite)
        return GuardResult(finite | (not self.not_finite), skipped, next_scale(state.scale, finite), guard)


def next_scale(scale: Arrays, finite: jax.Array) -> Arrays:
    """Halve the scale after an overflow, double it after 2,000 good steps. Source: torch.amp.GradScaler's defaults."""
    if not scale:
        return scale
    grown = scale["good_steps"] + 1 >= SCALE_GROWTH_STEPS
    doubled = scale["value"] * 2
    value = jnp.where(grown & jnp.isfinite(doubled), doubled, scale["value"])
    good_steps = jnp.where(finite & ~grown, scale["good_steps"] + 1, 0)
    return {"value": jnp.where(finite, value, scale["value"] / 2), "good_steps": good_steps}


def _follow(guard: Arrays, norm: jax.Array, finite: jax.Array) -> Arrays:
    """Update the running mean of the norm. A spike counts with the limit it exceeded, so that a lasting rise is
    followed."""
    count = guard["count"]
    memory = jnp.minimum(SPIKE_MEMORY, count / (count + 1.0))  # a plain mean at first
    mean = memory * guard["mean_norm"] + (1 - memory) * jnp.where(finite, norm, 0)
    return {
        "mean_norm": jnp.where(finite, mean, guard["mean_norm"]),
        "count": count + finite.astype(count.dtype),
    }
