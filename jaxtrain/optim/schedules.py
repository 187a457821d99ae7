"""Learning-rate schedules as pure functions: 0-based optimizer step -> factor on the peak learning rate.

They are evaluated on the host in float64 and passed to the compiled step as a table. So they equal torch's to the last
bit of float32, and a change of learning rate needs no new compilation. The torch originals' variants, including their
off-by-one errors, are in `systems/*/original/schedules.py`.
"""

import math
from collections.abc import Callable

import numpy as np

from jaxtrain.config import ScheduleConfig
from jaxtrain.errors import UserError

Schedule = Callable[[int], float]
PAGE = 1024  # steps


def constant() -> Schedule:
    return lambda step: 1.0


def cosine(total_steps: int, floor: float = 0.0) -> Schedule:
    """Return a cosine: 1 at step 0, `floor` from total_steps on. Source: Loshchilov & Hutter 2017; torch
    CosineAnnealingLR."""
    return lambda step: floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / max(1, total_steps))))


def cosine_with_restarts(total_steps: int, cycles: int = 1, floor: float = 0.0) -> Schedule:
    """Return `cycles` cosines in sequence, each from 1 towards `floor`. Source: Loshchilov & Hutter 2017, SGDR."""

    def value(step: int) -> float:
        progress = step / max(1, total_steps)
        if progress >= 1:
            return floor
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * (cycles * progress % 1.0)))

    return value


def linear(total_steps: int, floor: float = 0.0) -> Schedule:
    return lambda step: floor + (1 - floor) * max(0.0, 1 - step / max(1, total_steps))


def polynomial(total_steps: int, power: float = 1.0, floor: float = 0.0) -> Schedule:
    """Return `linear` raised to a power; 2 falls fast at first."""
    return lambda step: floor + (1 - floor) * max(0.0, 1 - step / max(1, total_steps)) ** power


def step_drops(every_steps: int, factor: float) -> Schedule:
    """Return a schedule that is multiplied by `factor` every `every_steps` steps. Source: torch StepLR."""
    return lambda step: factor ** (step // every_steps)


def wsd(total_steps: int, stable_steps: int, floor: float = 0.0) -> Schedule:
    """Return warm-up (added by `with_warmup`), stable, decay: 1 for stable_steps, then a cosine to `floor`."""
    decay = cosine(max(1, total_steps - stable_steps), floor)
    return lambda step: 1.0 if step < stable_steps else decay(step - stable_steps)


def with_warmup(schedule: Schedule, warmup_steps: int, start: float = 0.0) -> Schedule:
    """Put a linear warm-up before a schedule: from `start` at step 0 to 1 at warmup_steps, where `schedule` begins."""

    def value(step: int) -> float:
        if step < warmup_steps:
            return start + (1 - start) * step / warmup_steps
        return schedule(step - warmup_steps)

    return value


def momentum(start: float, end: float, total_steps: int, warmup_steps: int = 0, shape: str = "linear") -> Schedule:
    """Return the momentum of an averaged (target) network: `start` during the warm-up, then rising to `end` at
    total_steps.

    shape: "linear", or "cosine" as in Grill et al. 2020 (BYOL), sec. 3.1. The schedule returns a value, not a factor.
    """

    def value(step: int) -> float:
        progress = min(1.0, max(0.0, (step - warmup_steps) / max(1, total_steps - warmup_steps)))
        if shape == "cosine":
            progress = 0.5 * (1 - math.cos(math.pi * progress))
        return start + (end - start) * progress

    return value


def levels(schedules: list[Schedule]) -> Callable[[int], list[float]]:
    """Combine schedules into one that returns a value for each level of a hierarchy."""
    return lambda step: [schedule(step) for schedule in schedules]


def build(config: ScheduleConfig, lr: float, total_steps: int, steps_per_epoch: int) -> Schedule:
    """Return the schedule that a config describes. `plateau` is constant here: the trainer scales it after evaluations.

    Raises UserError if min_lr is above lr.
    """
    warmup = warmup_steps(config, total_steps, steps_per_epoch)
    rest = max(0, total_steps - warmup)  # a run shorter than its warm-up never leaves it
    floor = config.min_lr / lr if lr else 0.0
    if floor > 1:
        raise UserError(f"optim.schedule.min_lr: {config.min_lr} is above optim.lr {lr}")
    body = {
        "constant": lambda: constant(),
        "plateau": lambda: constant(),
        "cosine": lambda: cosine(rest, floor),
        "cosine_with_restarts": lambda: cosine_with_restarts(rest, config.cycles, floor),
        "linear": lambda: linear(rest, floor),
        "polynomial": lambda: polynomial(rest, config.power, floor),
        "step": lambda: step_drops(config.step_epochs * steps_per_epoch, config.factor),
        "wsd": lambda: wsd(rest, int(rest * config.stable_ratio), floor),
    }[config.name]()
    return with_warmup(body, warmup, config.warmup_start)


def warmup_steps(config: ScheduleConfig, total_steps: int, steps_per_epoch: int) -> int:
    if config.warmup_epochs is not None:
        return round(config.warmup_epochs * steps_per_epoch)
    if config.warmup_ratio is not None:
        return int(config.warmup_ratio * total_steps)
    return config.warmup_steps or 0


def table(schedule: Schedule, steps: int) -> np.ndarray:
    """Return the factor of every step of a run, float32 [steps rounded up to whole pages]; the last one is repeated.

    Runs whose lengths differ by less than a page share one compiled step.
    """
    factors = np.array([schedule(step) for step in range(steps)], np.float32)
    return np.pad(factors, (0, -steps % PAGE), "edge")
