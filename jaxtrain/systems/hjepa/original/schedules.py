"""The original's schedules, in Python's float64: a call with a step returns the value.

The core's own schedules (`optim.schedule`) drive training; these serve scripts that were written for the original, and
`compat: original`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar


@dataclasses.dataclass(eq=False)
class _WarmedUp:
    """Linear warm-up from start_warmup_value to base_value over warmup_epochs, then
    `_after(share of the rest done)`."""

    base_value: float
    final_value: float
    epochs: int
    steps_per_epoch: int
    warmup_epochs: int = 0
    start_warmup_value: float = 0.0
    _after: ClassVar[Callable[[Any, float], float]]

    @property
    def warmup_steps(self) -> int:
        return self.warmup_epochs * self.steps_per_epoch

    @property
    def total_steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.start_warmup_value + (self.base_value - self.start_warmup_value) * step / self.warmup_steps
        return self._after((step - self.warmup_steps) / (self.total_steps - self.warmup_steps))

    def get_epoch_value(self, epoch: int) -> float:
        return self(epoch * self.steps_per_epoch)


class CosineScheduler(_WarmedUp):
    """Linear warm-up from start_warmup_value to base_value over warmup_epochs, then half a cosine to final_value.

    The cosine ends at `epochs`. It is not clamped: past the end it rises again.
    """

    def _after(self, progress: float) -> float:
        return self.final_value + (self.base_value - self.final_value) * 0.5 * (1 + math.cos(math.pi * progress))


class LinearScheduler(_WarmedUp):
    """Linear warm-up from start_warmup_value to base_value over warmup_epochs, then linear to final_value.

    It is not clamped: past the end it keeps falling.
    """

    def _after(self, progress: float) -> float:
        return self.base_value - (self.base_value - self.final_value) * progress


@dataclasses.dataclass(eq=False)
class EMAScheduler:
    """Constant base_value during warm-up, then linear to final_value at `epochs`, and constant after that."""

    base_value: float = 0.996
    final_value: float = 1.0
    epochs: int = 100
    steps_per_epoch: int = 1
    warmup_epochs: int = 0

    @property
    def warmup_steps(self) -> int:
        return self.warmup_epochs * self.steps_per_epoch

    @property
    def total_steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.base_value
        progress = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        return self.base_value + (self.final_value - self.base_value) * progress

    def step(self, step: int) -> float:
        return self(step)

    def get_epoch_value(self, epoch: int) -> float:
        return self(epoch * self.steps_per_epoch)


class HierarchicalScheduler:
    """One schedule per hierarchy level; a call returns the list of their values.

    As a trainer's `lr_scheduler`, its l-th value is the rate of the optimizer's l-th parameter group.
    """

    def __init__(self, schedulers: list):
        self.schedulers = list(schedulers)

    @property
    def num_levels(self) -> int:
        return len(self.schedulers)

    def __len__(self) -> int:
        return len(self.schedulers)

    def __call__(self, step: int) -> list[float]:
        return [scheduler(step) for scheduler in self.schedulers]

    def get_level_value(self, step: int, level: int) -> float:
        return self.schedulers[level](step)


def create_lr_scheduler(
    optimizer_type: str = "adamw",
    base_lr: float = 1e-4,
    min_lr: float = 1e-6,
    epochs: int = 100,
    steps_per_epoch: int = 1,
    warmup_epochs: int = 0,
    schedule_type: str = "cosine",
):
    """Return a "cosine" or "linear" schedule with warm-up from 0. optimizer_type is not used, as in the original."""
    kinds = {"cosine": CosineScheduler, "linear": LinearScheduler}
    if schedule_type not in kinds:
        raise ValueError(f"schedule_type={schedule_type!r} is unknown; known: cosine, linear")
    return kinds[schedule_type](base_lr, min_lr, epochs, steps_per_epoch, warmup_epochs)


def create_ema_scheduler(
    base_momentum: float = 0.996,
    final_momentum: float = 1.0,
    epochs: int = 100,
    steps_per_epoch: int = 1,
    warmup_epochs: int = 0,
) -> EMAScheduler:
    return EMAScheduler(base_momentum, final_momentum, epochs, steps_per_epoch, warmup_epochs)


@dataclasses.dataclass(frozen=True)
class OriginalProcedure:
    """The original trainer's rates, from its `training` section (a mapping) and the batches of an epoch.

    Step 0 runs at the full learning rate and step k at schedule(k - 1), because the original sets the rate after the
    update. Like the original, it reads only `scheduler_params.min_lr` and `ema_momentum_schedule`.
    """

    training: dict
    batches_per_epoch: int

    @property
    def accumulation_steps(self) -> int:
        return self.training.get("accumulation_steps", 1)

    @property
    def steps_per_epoch(self) -> int:
        return self.batches_per_epoch // self.accumulation_steps

    @property
    def base_lr(self) -> float:
        return self.training.get("lr", self.training.get("learning_rate", 1e-4))

    def schedule(self):
        training = self.training
        return create_lr_scheduler(
            base_lr=self.base_lr,
            min_lr=(training.get("scheduler_params") or {}).get("min_lr", 1e-6),
            epochs=training["epochs"],
            steps_per_epoch=self.steps_per_epoch,
            warmup_epochs=training.get("warmup_epochs", 0),
            schedule_type=training.get("lr_schedule", "cosine"),
        )

    def lr(self, step: int) -> float:
        """Return the learning rate that optimizer step `step` (0-based) applies."""
        return self.base_lr if step == 0 else self.schedule()(step - 1)

    def momentum(self, step: int) -> float:
        """Return the EMA momentum of every micro-batch of optimizer step `step`."""
        ema = self.training.get("ema_momentum_schedule") or {}
        warmup = ema.get("warmup_steps", 1000) // self.steps_per_epoch
        start, end = ema.get("start", 0.996), ema.get("end", 1.0)
        return EMAScheduler(start, end, self.training["epochs"], self.steps_per_epoch, warmup)(step)
