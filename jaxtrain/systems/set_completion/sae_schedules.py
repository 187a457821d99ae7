"""Coefficients by the SAE's own step, counted from 0, and the original's score of a run. Traceable."""

import math

import jax.numpy as jnp


def usage_coefficient(step, base: float, warmup_steps: int, period_steps: int, floor: float):
    """From `floor` straight up to `base` in warmup_steps, then a cosine that dips to `floor` once per period.

    base 0 does not switch it off unless floor is 0 too: the original's rule.
    """
    warm = floor + (base - floor) * step / max(1, warmup_steps)
    phase = (step - warmup_steps) % period_steps
    wave = floor + (base - floor) * 0.5 * (1 + jnp.cos(2 * math.pi * phase / period_steps))
    return jnp.where(step < warmup_steps, warm, wave)


def l1_coefficient(step, base: float, warmup_steps: int, start: float):
    """From `start` straight to `base` in warmup_steps, then `base`."""
    return jnp.where(step < warmup_steps, start + (base - start) * step / max(1, warmup_steps), base)


def cosine_rate(step, lr: float, total_steps: int, floor_ratio: float = 0.1):
    """torch CosineAnnealingLR with eta_min = floor_ratio * lr; it rises again after total_steps, as torch's does."""
    eta_min = floor_ratio * lr
    return eta_min + (lr - eta_min) * (1 + jnp.cos(math.pi * step / total_steps)) / 2


def original_total_steps(epochs: int, batches: int, batch_size: int, steps_before_train: int, train_steps: int) -> int:
    """T_max of the original's cosine. It ignores that steps_before_train counts rows of a buffer that may empty."""
    return max(0, epochs * batches - steps_before_train // batch_size) * train_steps or epochs * batches


def miracle_distance(mse: float, l0: float, dead_percent: float) -> float:
    """The original's score: log distance to mse 0.0003, l0 0.09 and 3.5 % dead, each ratio floored at 0.1.

    The original passes (1 - l0) * 100 as dead_percent, which is no death rate; see docs/set_completion.md.
    """
    targets = ((mse, 0.0003), (l0, 0.09), (dead_percent, 3.5))
    return math.sqrt(sum(math.log(max(value / target, 0.1)) ** 2 for value, target in targets))
