"""The run's learning rates as torch schedulers: the original's classes with this project's curve."""

from typing import Any

import torch
from torch.optim import lr_scheduler

from jaxtrain.optim import schedules
from jaxtrain.systems.fmri_autoencoder.original.schedules import schedule as task_schedule


class _Followed:
    """Mixin of a torch scheduler whose rates are the run's, optimizer step by optimizer step."""

    def follow(self, curve: Any) -> None:
        self._curve = curve
        self.go_to(self.last_epoch)

    def go_to(self, step: int) -> None:
        """Set the rates of a step; 0 is the first."""
        self.last_epoch = step
        self._step_count = step + 1
        rates = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._last_lr = rates

    def get_lr(self) -> list[float]:
        curve = getattr(self, "_curve", None)
        return [base * (1.0 if curve is None else float(curve(self.last_epoch))) for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict().items() if name != "_curve"}


class Cosine(_Followed, lr_scheduler.CosineAnnealingLR):
    """Linear warm-up, then a cosine to min_lr."""


class Drops(_Followed, lr_scheduler.StepLR):
    """Drops of the rate at regular intervals: by default tenfold every 30 epochs."""


def scheduler_of(config: Any, optimizer: torch.optim.Optimizer, steps_per_epoch: int, epochs: int):
    """Return the scheduler of a run's config, to be stepped after each optimizer step; None for a constant rate."""
    settings, per_epoch = config.optim.schedule, max(1, steps_per_epoch)
    total = per_epoch * epochs
    if settings.name == "constant":
        return None
    curve = schedules.build(settings, config.optim.lr, total, per_epoch)
    config = config.model_copy(update={"train": config.train.model_copy(update={"steps": total})})
    curve = task_schedule(config, curve, per_epoch)
    if settings.name == "cosine":
        after = total - schedules.warmup_steps(settings, total, per_epoch)
        scheduler = Cosine(optimizer, T_max=max(1, after), eta_min=settings.min_lr)
    else:
        scheduler = Drops(optimizer, step_size=settings.step_epochs * per_epoch, gamma=settings.factor)
    scheduler.follow(curve)
    return scheduler
