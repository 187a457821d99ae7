"""The original's learning-rate schedules (those of transformers), off-by-ones included, for `compat: original`."""

import math

from jaxtrain.optim.schedules import Schedule


def schedule(config, core_schedule, steps_per_epoch: int):
    """Return transformers' schedule with one extra step per epoch under `compat: original`, else the given schedule.

    The schedules step, wsd and plateau are always as given.
    """
    settings = config.optim.schedule
    if config.compat != "original" or settings.name in ("step", "wsd", "plateau"):
        return core_schedule
    warmup = settings.warmup_steps or int((settings.warmup_ratio or 0) * config.train.steps)
    # The original computes the schedule's length in micro-batches, not in updates.
    total = config.train.steps * config.train.accumulate_steps
    name = "constant_with_warmup" if settings.name == "constant" and warmup else settings.name
    original = transformers(name, total, warmup, lr=config.optim.lr, power=settings.power)
    return with_extra_step_per_epoch(original, steps_per_epoch)


def with_extra_step_per_epoch(schedule: Schedule, updates_per_epoch: int) -> Schedule:
    """Return the schedule with one value skipped per epoch.

    The original's trainer steps its scheduler once more after each epoch's validation.
    """
    return lambda step: schedule(step + step // updates_per_epoch)


def transformers(
    name: str,
    total_steps: int,
    warmup_steps: int = 0,
    *,
    lr: float = 1.0,
    cycles: float | None = None,
    power: float = 1.0,
    lr_end: float = 1e-7,
) -> Schedule:
    """Return transformers' schedule of that name. Warm-up starts at 0, so the first update changes nothing.

    name: linear, cosine (rises again past the end), cosine_with_restarts, polynomial, constant, constant_with_warmup,
    none; another one raises ValueError. lr: the base rate; polynomial needs it because its lr_end is absolute.
    """
    ramp = lambda step: step / max(1, warmup_steps)
    progress = lambda step: (step - warmup_steps) / max(1, total_steps - warmup_steps)

    def linear(step: int) -> float:
        if step < warmup_steps:
            return ramp(step)
        return max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))

    def cosine(step: int) -> float:
        if step < warmup_steps:
            return ramp(step)
        return max(0.0, 0.5 * (1 + math.cos(math.pi * (cycles or 0.5) * 2 * progress(step))))

    def restarts(step: int) -> float:
        if step < warmup_steps:
            return ramp(step)
        if progress(step) >= 1:
            return 0.0
        return max(0.0, 0.5 * (1 + math.cos(math.pi * ((cycles or 1) * progress(step) % 1.0))))

    def polynomial(step: int) -> float:
        if step < warmup_steps:
            return ramp(step)
        if step > total_steps:
            return lr_end / lr
        return ((lr - lr_end) * (1 - progress(step)) ** power + lr_end) / lr

    known = {
        "linear": linear,
        "cosine": cosine,
        "cosine_with_restarts": restarts,
        "polynomial": polynomial,
        "constant": lambda step: 1.0,
        "constant_with_warmup": lambda step: min(1.0, ramp(step)),
        "none": lambda step: 1.0,
    }
    if name not in known:
        raise ValueError(f"scheduler {name!r} is unknown; known: {', '.join(known)}")
    return known[name]
