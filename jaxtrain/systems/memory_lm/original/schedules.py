"""The original's learning-rate schedules with their edge cases, used if `optim.original_schedule` is set."""

import math

from jaxtrain.optim.schedules import Schedule


def schedule(config, schedule, steps_per_epoch: int):
    """Return the original's schedule if `optim.original_schedule` is set, else the given one."""
    options_of_original = config.optim.original_schedule
    if options_of_original is None:
        return schedule
    options = options_of_original.model_dump(exclude={"scheduler", "warmup_steps"})
    return original_schedule(
        options_of_original.scheduler, config.train.steps, options_of_original.warmup_steps, **options
    )


def training_schedule(training, total_steps: int) -> Schedule:
    """Return the schedule of the original's section `training`."""
    names = ("warmup_ratio", "min_lr_ratio", "decay_start_step", "decay_start_ratio", "wsd_stable_steps")
    options = {name: getattr(training, name) for name in (*names, "wsd_stable_ratio")}
    return original_schedule(training.scheduler, total_steps, training.warmup_steps, **options)


def original_schedule(
    name: str,
    total_steps: int,
    warmup_steps: int = 0,
    *,
    warmup_ratio: float | None = None,
    min_lr_ratio: float = 0.1,
    decay_start_step: int | None = None,
    decay_start_ratio: float | None = None,
    wsd_stable_steps: int | None = None,
    wsd_stable_ratio: float = 0.0,
) -> Schedule:
    """Return the schedule cosine, linear, constant or wsd (in any case), with warm-up from 0 and optional late decay.

    cosine and wsd rise again past the end; linear decays to 0 regardless of min_lr_ratio; constant has no warm-up.
    Raises ValueError for an unknown name, a ratio outside [0, 1] or negative wsd_stable_steps.
    """
    for key, ratio in {
        "warmup_ratio": warmup_ratio,
        "min_lr_ratio": min_lr_ratio,
        "decay_start_ratio": decay_start_ratio,
        "wsd_stable_ratio": wsd_stable_ratio,
    }.items():
        if ratio is not None and not 0 <= ratio <= 1:
            raise ValueError(f"{key}={ratio}, wanted a number from 0 to 1")
    if wsd_stable_steps is not None and wsd_stable_steps < 0:
        raise ValueError(f"wsd_stable_steps={wsd_stable_steps}, wanted at least 0")
    name = name.lower()
    warmup = int(total_steps * warmup_ratio) if warmup_ratio is not None else warmup_steps
    decay_start = decay_start_step
    if decay_start is None and decay_start_ratio is not None:
        decay_start = int(total_steps * decay_start_ratio)
    if name == "wsd":
        stable = wsd_stable_steps if wsd_stable_steps is not None else int(total_steps * wsd_stable_ratio)
        start = warmup + (stable if decay_start is None else max(decay_start - warmup, 0))
    else:
        start = warmup if decay_start is None else decay_start
    start = min(max(start, warmup), total_steps)

    def decay(step: int) -> float:
        progress = (step - start) / max(1, total_steps - start)
        return min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))

    def fall(step: int) -> float:
        return max(0.0, (total_steps - step) / max(1, total_steps - start))

    known = {"cosine": decay, "wsd": decay, "linear": fall, "constant": None}
    if name not in known:
        raise ValueError(f"scheduler {name!r} is unknown; known: {', '.join(known)}")
    if name == "constant":
        return lambda step: 1.0

    def value(step: int) -> float:
        if step < warmup:
            return step / max(1, warmup)
        return 1.0 if step < start else known[name](step)

    return value
