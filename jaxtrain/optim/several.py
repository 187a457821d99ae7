"""Several torch optimizers for one loss, stepped in order, such as Muon for matrices and AdamW for the rest."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.optim.torch_optimizer import Apply, Arrays, TorchUpdate


class OptimizerList:
    """Several torch optimizers with the interface of one. Raises UserError if an item is no torch optimizer."""

    def __init__(self, optimizers: Sequence[Any]):
        self.optimizers = list(optimizers)
        if not self.optimizers:
            raise UserError("optimizer: an empty list, wanted a torch.optim optimizer or several")
        for optimizer in self.optimizers:
            if not hasattr(optimizer, "param_groups"):
                raise UserError(
                    f"optimizer: a list with {type(optimizer).__name__}, wanted torch.optim optimizers (several optax "
                    "transformations are one: optax.multi_transform)"
                )

    def __iter__(self) -> Any:
        return iter(self.optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        return {parameter: state for optimizer in self for parameter, state in optimizer.state.items()}

    def step(self) -> None:
        for optimizer in self:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self:
            optimizer.zero_grad()

    def state_dict(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer in self]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        for optimizer, state in zip(self, states, strict=True):
            optimizer.load_state_dict(state)


class SchedulerList:
    """The schedulers of several optimizers, stepped together."""

    def __init__(self, schedulers: Sequence[Any]):
        self.schedulers = list(schedulers)

    def step(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()

    def state_dict(self) -> list[dict[str, Any]]:
        return [scheduler.state_dict() for scheduler in self.schedulers]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        for scheduler, state in zip(self.schedulers, states, strict=True):
            scheduler.load_state_dict(state)


class SeveralUpdates:
    """The updates of several torch optimizers, in order, with the same gradients. Implements Updates.

    names: id of a torch parameter -> its name. Raises NoCounterpart and UserError as TorchUpdate does.
    """

    def __init__(self, optimizers: Iterable[Any], names: Mapping[int, str]):
        self.parts = [TorchUpdate(optimizer, names) for optimizer in optimizers]
        self.keys = _once(key for part in self.parts for key in part.keys)

    @property
    def ahead(self) -> bool:
        return any(part.ahead for part in self.parts)

    def trained(self) -> tuple[str, ...]:
        return tuple(_once(key for part in self.parts for key in part.trained()))

    def state(self, params: Arrays) -> list[Any]:
        return [part.state({key: params[key] for key in part.keys}) for part in self.parts]

    def switches(self) -> tuple:
        return tuple(part.switches() for part in self.parts)

    def numbers(self) -> list[Any]:
        return [part.numbers() for part in self.parts]

    def compiled(self, keys: Sequence[str]) -> Apply:
        applied: list[Callable] = [part.compiled(_held(part, keys)) for part in self.parts]

        def update(grads: Arrays, state: Any, params: Arrays, numbers: Any) -> tuple[Arrays, Any]:
            after = []
            for apply, one, options in zip(applied, state, numbers, strict=True):
                moved, one = apply(grads, one, params, options)
                params = {**params, **moved}
                after.append(one)
            return params, after

        return update

    def after(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        for part in self.parts:
            part.after(_held(part, keys))

    def regrouped(self) -> bool:
        return any(part.regrouped() for part in self.parts)

    def edited(self) -> bool:
        return any(part.edited() for part in self.parts)

    def create(self, state: Sequence[Any]) -> None:
        for part, one in zip(self.parts, state, strict=True):
            part.create(one)

    def write_back(self, state: Sequence[Any]) -> None:
        for part, one in zip(self.parts, state, strict=True):
            part.write_back(one)


def _held(part: TorchUpdate, keys: Sequence[str]) -> list[str]:
    return [key for key in keys if key in part.keys]


def _once(keys: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(keys))
