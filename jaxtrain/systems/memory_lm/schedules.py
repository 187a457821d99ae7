"""The original's learning-rate factor, for `compat: original` and for configs of the original."""

import math
from collections.abc import Callable

from jaxtrain.errors import UserError


def lr_factor(
    scheduler: str,
    total_steps: int,
    warmup_steps: int = 0,
    warmup_ratio: float | None = None,
    min_lr_ratio: float = 0.1,
    decay_start_step: int | None = None,
    decay_start_ratio: float | None = None,
    wsd_stable_steps: int | None = None,
    wsd_stable_ratio: float = 0.0,
) -> Callable[[int], float]:
    """0-based optimizer step -> factor on the peak learning rate, with the original's edges: `constant` has no warm-up,
    `linear` ends at 0, `cosine` and `wsd` rise again past total_steps.

    scheduler: cosine, linear, constant or wsd, in any case. Raises UserError for ratios outside [0, 1] and other names.
    """
    name = scheduler.lower()
    if name not in ("cosine", "linear", "constant", "wsd"):
        raise UserError(f"training.scheduler: {scheduler!r} is unknown, wanted cosine, linear, constant or wsd")
    for key, ratio in (
        ("warmup_ratio", warmup_ratio),
        ("decay_start_ratio", decay_start_ratio),
        ("wsd_stable_ratio", wsd_stable_ratio),
    ):
        if ratio is not None and not 0 <= ratio <= 1:
            raise UserError(f"training.{key}: {ratio}, wanted 0 to 1")
    if wsd_stable_steps is not None and wsd_stable_steps < 0:
        raise UserError(f"training.wsd_stable_steps: {wsd_stable_steps}, wanted 0 or more")
    if name == "constant":
        return lambda step: 1.0
    warmup = warmup_steps if warmup_ratio is None else int(total_steps * warmup_ratio)
    given = decay_start_step
    if given is None and decay_start_ratio is not None:
        given = int(total_steps * decay_start_ratio)
    if name == "wsd":
        stable = int(total_steps * wsd_stable_ratio) if wsd_stable_steps is None else wsd_stable_steps
        if given is not None:
            stable = max(given - warmup, 0)
        given = warmup + stable
    start = min(max(warmup if given is None else given, warmup), max(total_steps, warmup))
    span = max(1, total_steps - start)

    def factor(step: int) -> float:
        if step < warmup:
            return step / max(1, warmup)
        if step < start:
            return 1.0
        if name == "linear":
            return max(0.0, (total_steps - step) / span)
        return min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * (step - start) / span))

    return factor
