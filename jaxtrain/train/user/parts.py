"""The user's own optimizer, schedule and metrics, as a Program takes them."""

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
    """The user's own parts, each may be None. given: the optimizer. schedule: update -> factor on optim.lr. metrics."""

    given: given_optimizer.Given | None = None
    schedule: Callable[[int], float] | None = None
    metrics: UserMetrics | None = None

    @classmethod
    def of(
        cls, config: TrainingConfig, model: Any, loss: Any, optimizer: Any, scheduler: Any, interval: str
    ) -> "UserParts":
        """Convert the optimizer and scheduler given to a Trainer. Raises UserError if one has no counterpart.

        model, loss: the user's. interval: how often a torch scheduler is stepped, "step" or "epoch".
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
        """Return a copy with metrics. model: the user's. Raises UserError for invalid metrics."""
        if not metrics and compute_metrics is None:
            return self
        own = UserMetrics(metrics, compute_metrics, TORCH if is_torch_module(model) else JAX, task.target)
        return dataclasses.replace(self, metrics=own)

    def applied(self, task: Task, config: TrainingConfig) -> tuple[Task, TrainingConfig]:
        """Return task and config adapted to the user's optimizer: only parameters that it holds are trained, and
        gradients are clipped only if it was given a limit."""
        given = self.given
        if given is None:
            return task, config
        trains, optim = task.trainable, config.optim.model_copy(update={"clip_norm": given.clip_norm})
        held = dataclasses.replace(task, trainable=lambda key, config: given.holds(key) and trains(key, config))
        return held, config.model_copy(update={"optim": optim})


def _parameter_names(model: Any, loss: Any) -> Mapping[str, int] | None:
    """Map every name of a torch module's parameters to the parameter's id; return None for another model."""
    if not is_torch_module(model):
        return None
    from torch_bridge.from_torch import unwrapped
    from torch_bridge.optimizers import trained_names

    return trained_names(unwrapped(model), loss)
