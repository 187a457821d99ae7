"""The originals' learning rates, faults included, for `compat: original`. Correct runs use the core's schedules."""

import dataclasses
import math
from collections.abc import Callable

from jaxtrain.errors import UserError
from jaxtrain.systems.fmri_autoencoder.config import HeadOptions

HEAD_START = 1e-5  # absolute learning rate of the second generation's first step
GEN1_START = 0.1  # fraction of the base rate at which the first generation starts


def schedule(config, core_schedule, steps_per_epoch: int):
    """Return the core's schedule, or under compat: original the one that the original follows by mistake."""
    settings = config.optim.schedule
    kinds = {"cosine": "cosine", "step": "step", "constant": "none"}
    if config.compat != "original" or settings.name not in kinds or not config.optim.lr:
        return core_schedule
    epochs = settings.warmup_epochs
    if epochs is None:
        epochs = (settings.warmup_steps or 0) / steps_per_epoch
    if epochs != int(epochs):
        raise UserError("optim.schedule: compat: original counts the warm-up in whole epochs; set warmup_epochs")
    rule = OriginalRate(
        base=config.optim.lr,
        steps=steps_per_epoch,
        epochs=-(-config.train.steps // steps_per_epoch),
        warmup_epochs=int(epochs),
        min_lr=settings.min_lr,
        kind=kinds[settings.name],
    )
    rate = (head_rate if isinstance(config.model, HeadOptions) else gen1_rate)(rule)
    return lambda step: rate(step) / config.optim.lr


@dataclasses.dataclass(frozen=True)
class OriginalRate:
    """Parameters and curve of the schedule in both originals. steps: training batches per epoch."""

    base: float
    steps: int
    epochs: int
    warmup_epochs: int = 5
    min_lr: float = 1e-6
    kind: str = "cosine"  # cosine, step or none

    @property
    def warmup(self) -> int:
        return self.steps * self.warmup_epochs

    @property
    def after(self) -> int:
        """Return the steps after the warm-up, which are the cosine's half period."""
        return self.steps * self.epochs - self.warmup

    def annealed(self, start: float, position: int) -> float:
        """Return the value of a cosine from `start` at position 0 to min_lr at `after`.

        One position later it turns back up from `base`, as torch's CosineAnnealingLR does.
        """
        if position == self.after + 1:
            return self.min_lr + (self.base - self.min_lr) * (1 - math.cos(math.pi / self.after)) / 2
        return self.min_lr + (start - self.min_lr) * (1 + math.cos(math.pi * position / self.after)) / 2


def head_rate(rule: OriginalRate) -> Callable[[int], float]:
    """Return the second generation's learning rate by 0-based optimizer step: linear from 1e-5, then a cosine.

    The base rate is never reached, and without warm-up the whole cosine starts at 1e-5. Raises UserError where the
    original stops: for a base below 1e-5; for scheduler `step` after one step; at the end if all epochs are warm-up.
    """
    if rule.kind == "none":
        return lambda step: rule.base
    if rule.kind == "step":
        return lambda step: rule.base if step == 0 else _stop("scheduler_type 'step' fails after its first step")
    if rule.base < HEAD_START:
        _stop(f"a learning rate of {rule.base:g} is below the warm-up's start of 1e-5")
    start = HEAD_START / rule.base

    def ramp(step: int) -> float:
        return rule.base * (start + (1 - start) * step / rule.warmup)

    def rate(step: int) -> float:
        if step < rule.warmup:
            return ramp(step)
        if rule.after == 0:
            _stop("warm-up lasts the whole run, which fails at its last step")
        if rule.warmup == 0:
            return rule.annealed(HEAD_START, step)
        return rule.annealed(ramp(rule.warmup - 1), step - rule.warmup + 1)

    return rate


def gen1_rate(rule: OriginalRate) -> Callable[[int], float]:
    """Return the first generation's learning rate by 0-based optimizer step.

    Its warm-up and cosine are counted in steps but advanced once per epoch, so a run of 195 steps per epoch stays at a
    tenth of its base rate.
    """

    def ramp(epoch: int) -> float:
        return rule.base * (GEN1_START + (1 - GEN1_START) * epoch / rule.warmup if rule.warmup else GEN1_START)

    def rate(step: int) -> float:
        epoch = step // rule.steps
        if rule.kind == "none":
            return rule.base
        if rule.kind == "step":
            return rule.base * 0.1 ** (epoch // 30)
        if epoch <= rule.warmup_epochs:
            return ramp(epoch)
        return rule.annealed(ramp(rule.warmup_epochs), epoch - rule.warmup_epochs)

    return rate


def _stop(why: str):
    raise UserError(f"compat: original reproduces a fault of the original here: {why}. Use compat: correct")
