"""A trainer's torch model and optimizer, and the compiled step that trains them."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import jax

from jaxtrain.compiled_step.or_torch import StepOrTorch
from jaxtrain.errors import UserError

PLAIN = (int, float, str, MethodType)  # compared by value; of all else, another object is another part


class SyncedObjects:
    """Base of a trainer whose `model` and `optimizer` are torch objects with the newest values of a compiled step.

    A subclass sets `_model` and `_optimizer`, makes the step in `_new_step`, and returns in `_step_parts` the objects
    and numbers that the step was made of: after a change of one, the next call makes a new step.
    """

    _model: Any
    _optimizer: Any
    _step_parts: Callable[[], tuple]
    _new_step: Callable[[], StepOrTorch]
    _compiled: StepOrTorch | None = None
    _compiled_of: tuple = ()

    @property
    def model(self) -> Any:
        """The torch module, with the newest weights."""
        self._sync()
        return self._model

    @model.setter
    def model(self, model: Any) -> None:
        self._forget_step()
        self._model = model

    @property
    def optimizer(self) -> Any:
        """The torch optimizer, with the newest state."""
        self._sync()
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        self._forget_step()
        self._optimizer = optimizer

    def _sync(self) -> None:
        """Write the compiled step's weights and moments into the torch objects."""
        if self._compiled is not None:
            self._compiled.sync()

    def _forget_step(self) -> None:
        """Sync, and make a new step at the next call."""
        self._sync()
        self._compiled = None

    def _step(self) -> StepOrTorch:
        """Return the step of the present objects."""
        parts = self._step_parts()
        if self._compiled is None or not all(map(_is_same, self._compiled_of, parts)):
            self._forget_step()
            self._compiled, self._compiled_of = self._new_step(), parts
        return self._compiled


def check_shard(shard: Any, key: str) -> None:
    """Raise UserError for weights divided over several processes, none of which could then save them alone."""
    if jax.process_count() > 1 and (shard.strategy != "ddp" or shard.tensor > 1):
        raise UserError(
            f"{key}: the Trainer shards weights over the devices of one process, but {jax.process_count()} have "
            "started; start one, or shard over several with `python -m jaxtrain.run`"
        )


def _is_same(old: Any, new: Any) -> bool:
    return old is new or (isinstance(old, PLAIN) and isinstance(new, PLAIN) and old == new)
