"""The schedules of the torch originals exactly as their code has them, off-by-ones included, for `compat: original`.

Every function returns a schedule: 0-based optimizer step -> factor on the base learning rate that this step uses. A
task hands one to the trainer through `Task.schedule`. What differs from `schedules.py` is said in each docstring.
"""

import math

from jaxtrain.optim.schedules import Schedule

# --- PyTorch ------------------------------------------------------------------------------------------------------


def cosine_annealing(total_steps: int, floor: float = 0.0) -> Schedule:
    """torch CosineAnnealingLR, eta_min = floor * lr. Periodic: it rises again after total_steps."""
    return lambda step: floor + (1 - floor) * (1 + math.cos(math.pi * step / total_steps)) / 2


def warmup_cosine(total_steps: int, warmup_steps: int, floor: float = 0.0, start: float = 0.0) -> Schedule:
    """H-JEPA's cosine: `start` to 1 in warmup_steps, then half a cosine to `floor`; rises again past total_steps.

    Raises ZeroDivisionError after a warm-up as long as the run, as the original does.
    """

    def value(step: int) -> float:
        if step < warmup_steps:
            return start + (1 - start) * step / warmup_steps
        progress = (step - warmup_steps) / (total_steps - warmup_steps)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    return value


def warmup_linear(total_steps: int, warmup_steps: int, floor: float = 0.0, start: float = 0.0) -> Schedule:
    """H-JEPA's linear: as `warmup_cosine` with a straight line, which falls below `floor` past total_steps."""

    def value(step: int) -> float:
        if step < warmup_steps:
            return start + (1 - start) * step / warmup_steps
        return 1 - (1 - floor) * (step - warmup_steps) / (total_steps - warmup_steps)

    return value


# --- how an original's trainer calls its schedule -------------------------------------------------------------------


def one_step_late(schedule: Schedule) -> Schedule:
    """H-JEPA's trainer sets the rate after the update: step 0 runs at the full rate, step k at schedule(k - 1)."""
    return lambda step: 1.0 if step == 0 else schedule(step - 1)


def with_extra_step_per_epoch(schedule: Schedule, updates_per_epoch: int) -> Schedule:
    """The criteria trainer steps its scheduler once more after each epoch's validation: every epoch skips a value."""
    return lambda step: schedule(step + step // updates_per_epoch)


# --- transformers.get_scheduler (criteria and evidence) ---------------------------------------------------------------


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
    """transformers' schedule of that name; a warm-up starts at 0, so the first update moves nothing.

    name: linear, cosine (rises again past the end), cosine_with_restarts, polynomial, constant, constant_with_warmup,
    none. lr: the base rate, which polynomial needs for its absolute lr_end. Raises ValueError for another name.
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


# --- memory LM --------------------------------------------------------------------------------------------------------


def memory_lm(
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
    """cosine, linear, constant or wsd (in any case) with a warm-up from 0 and a decay that may start late.

    cosine and wsd rise again past the end, linear goes to 0 whatever min_lr_ratio says, constant has no warm-up.
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


# --- fMRI autoencoder -------------------------------------------------------------------------------------------------


def fmri_per_step(lr: float, steps_per_epoch: int, epochs: int, warmup_epochs: int, min_lr: float = 1e-6) -> Schedule:
    """The second generation's cosine, advanced every step: a ramp from an absolute 1e-5, then a cosine from the last
    value of the ramp, so that lr itself is never reached and no warm-up means the whole run starts from 1e-5.

    Raises ValueError where lr is below 1e-5, and ZeroDivisionError at the last step of a run that is all warm-up.
    """
    first = 1e-5 / lr
    if first > 1:
        raise ValueError(f"learning_rate={lr}, wanted at least 1e-5: the original's warm-up starts there")
    warmup, total = steps_per_epoch * warmup_epochs, steps_per_epoch * epochs
    ramp = lambda step: first + (1 - first) * step / warmup
    top = ramp(warmup - 1) if warmup else first
    floor = min_lr / lr

    def value(step: int) -> float:
        if step < warmup:
            return ramp(step)
        progress = (step - max(warmup, 1) + 1) / (total - warmup)
        return floor + (top - floor) * (1 + math.cos(math.pi * progress)) / 2

    return value


def fmri_per_epoch(
    name: str, lr: float, steps_per_epoch: int, epochs: int, warmup_epochs: int, min_lr: float = 1e-6
) -> Schedule:
    """The first generation's cosine, step or none, advanced once per epoch although the cosine counts steps.

    cosine: from 0.1 to 1 over warmup *steps* read as epochs, so a normal run stays near a tenth of lr.
    """
    warmup, total = steps_per_epoch * warmup_epochs, steps_per_epoch * epochs
    floor = min_lr / lr
    ramp = lambda epoch: 0.1 + 0.9 * epoch / warmup if warmup else 0.1

    def cosine(epoch: int) -> float:
        if epoch <= warmup_epochs:
            return ramp(epoch)
        top = ramp(warmup_epochs)
        return floor + (top - floor) * (1 + math.cos(math.pi * (epoch - warmup_epochs) / (total - warmup))) / 2

    known = {"cosine": cosine, "step": lambda epoch: 0.1 ** (epoch // 30), "none": lambda epoch: 1.0}
    if name not in known:
        raise ValueError(f"scheduler_type={name!r} is unknown; known: {', '.join(known)}")
    return lambda step: known[name](step // steps_per_epoch)
