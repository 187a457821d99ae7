"""Optimizer, schedule and metrics of the user's own, as a Program takes them."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxtrain.config import TrainingConfig
from jaxtrain.errors import UserError
from jaxtrain.optim import given as given_optimizer
from jaxtrain.task import Task
from jaxtrain.torch_task import is_torch_module
from jaxtrain.train.user.metrics import JAX, TORCH, UserMetrics


@dataclasses.dataclass(frozen=True)
class UserParts:
    """given: an optimizer, or None. schedule: factors on optim.lr by update, or None. metrics: or None."""

    given: given_optimizer.Given | None = None
    schedule: Callable[[int], float] | None = None
    metrics: UserMetrics | None = None

    @classmethod
    def of(
        cls, config: TrainingConfig, model: Any, loss: Any, optimizer: Any, scheduler: Any, interval: str
    ) -> "UserParts":
        """Take the optimizer and scheduler that were given to a Trainer. Raises UserError for what has no counterpart.

        model, loss: the user's. interval: at which a torch scheduler is stepped.
        """
        if config.lora.rank and optimizer is not None and not hasattr(optimizer, "update"):
            raise UserError(
                "optimizer: holds parameters of the module without its adapters; with lora, set optim instead, or give "
                "an optax GradientTransformation"
            )
        names = lambda: _parameter_names(model, loss)
        return cls(*given_optimizer.take(optimizer, scheduler, interval, config.optim, names))

    def with_metrics(
        self, metrics: Mapping[str, Any] | None, compute_metrics: Callable | None, model: Any, task: Task
    ) -> "UserParts":
        """The same with metrics. model: the user's. Raises UserError for what is none."""
        if not metrics and compute_metrics is None:
            return self
        own = UserMetrics(metrics, compute_metrics, TORCH if is_torch_module(model) else JAX, task.target)
        return dataclasses.replace(self, metrics=own)

    def applied(self, task: Task, config: TrainingConfig) -> tuple[Task, TrainingConfig]:
        """A task that trains what the optimizer holds, and a config that clips only where it was asked to."""
        given = self.given
        if given is None:
            return task, config
        trains, optim = task.trainable, config.optim.model_copy(update={"clip_norm": given.clip_norm})
        held = dataclasses.replace(task, trainable=lambda key, config: given.holds(key) and trains(key, config))
        return held, config.model_copy(update={"optim": optim})


def _parameter_names(model: Any, loss: Any) -> Mapping[str, int] | None:
    """Every name of a torch module's parameters -> id of the parameter; None for another model."""
    if not is_torch_module(model):
        return None
    from torch_bridge.from_torch import unwrapped
    from torch_bridge.optimizers import trained_names

    return trained_names(unwrapped(model), loss)
