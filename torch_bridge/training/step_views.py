"""Views of the training loop's objects for a recorded training_step: reads are noted, changes refused.

Recording runs training_step once. Before every later step, the plain values that it read are compared. If one has
changed, or if training_step sets an attribute or calls a method, the caller runs the step in torch.
"""

import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from jaxtrain.errors import UserError
from torch_bridge.lowering.python.numbers import Number
from torch_bridge.lowering.python.places import is_plain

COLLECTIVES = ("all_gather", "reduce", "broadcast", "barrier")  # of a strategy: no-ops on one process
_MAPPING = ("get", "keys", "values", "items")
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_MISSING = object()


class Notes:
    """Values that a recorded training_step reads from the loop. refused: the first operation that was refused."""

    def __init__(self, module: torch.nn.Module):
        self._own = {id(inner) for inner in module.modules()}
        self._read: dict[str, tuple[Callable[[], Any], Any]] = {}
        self.refused = ""

    def refuse(self, what: str) -> NoReturn:
        """Raise UserError; `refused` keeps the message in case training_step catches it."""
        self.refused = self.refused or f"training_step {what}"
        raise UserError(self.refused)

    def note(self, name: str, get: Callable[[], Any]) -> Any:
        """Return the value of `get`, which must not change later. Raises the same errors as `get`."""
        try:
            value = get()
        except (AttributeError, KeyError, IndexError):
            self._read[name] = get, _MISSING
            raise
        self._read[name] = get, _copy(value)
        return value

    def read(self, name: str, get: Callable[[], Any]) -> Any:
        """Return plain values, tensors and modules of the step itself as they are, and a view of anything else."""
        return self.shown(name, self.note(name, get))

    def shown(self, name: str, value: Any) -> Any:
        """Return the value itself or its view. Raises UserError for a trainable tensor or a foreign module."""
        if isinstance(value, torch.Tensor) and not value.requires_grad:
            return value
        if isinstance(value, torch.nn.Module) and id(value) in self._own:
            return value
        if isinstance(value, (torch.Tensor, torch.nn.Module)):
            self.refuse(f"takes {name}, which is no input of the compiled step")
        return value if is_plain(value) else View(name, value, self)

    def changed(self) -> str:
        """Return the name of a value that has changed since it was read, or ""."""
        return next((name for name, (get, value) in self._read.items() if not _same(value, _now(get))), "")


class View:
    """View of one of the loop's objects. It passes isinstance checks for the object's class."""

    __slots__ = ("_view",)
    _view: tuple[str, Any, Notes]

    def __init__(self, name: str, target: Any, notes: Notes):
        object.__setattr__(self, "_view", (name, target, notes))

    __class__ = property(lambda self: type(self._view[1]))  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        place, target, notes = self._view
        if name.startswith("__"):
            raise AttributeError(name)
        if isinstance(target, Mapping) and name in _MAPPING:
            return getattr(_Items(self), name)
        if name in COLLECTIVES and place.endswith(".strategy") and type(target).__module__.startswith("lightning."):
            return getattr(target, name)
        value = notes.note(f"{place}.{name}", lambda: getattr(target, name))
        if isinstance(value, _FUNCTIONS):
            return lambda *args, **kwargs: notes.refuse(f"calls {place}.{name}, which has to happen at every step")
        return notes.shown(f"{place}.{name}", value)

    def __setattr__(self, name: str, value: Any) -> None:
        self._refuse(f"sets {self._view[0]}.{name}, which has to happen at every step")

    def __delattr__(self, name: str) -> None:
        self._refuse(f"deletes {self._view[0]}.{name}, which has to happen at every step")

    def __setitem__(self, key: Any, value: Any) -> None:
        self._refuse(f"sets {self._view[0]}[{key!r}], which has to happen at every step")

    def __delitem__(self, key: Any) -> None:
        self._refuse(f"deletes {self._view[0]}[{key!r}], which has to happen at every step")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse(f"calls {self._view[0]}, which has to happen at every step")

    def __getitem__(self, key: Any) -> Any:
        place, target, notes = self._view
        return notes.read(f"{place}[{key!r}]", lambda: target[key])

    def __len__(self) -> int:
        place, target, notes = self._view
        return notes.note(f"len({place})", lambda: len(target))

    def __bool__(self) -> bool:
        place, target, notes = self._view
        return notes.note(f"bool({place})", lambda: bool(target))

    def __contains__(self, key: Any) -> bool:
        place, target, notes = self._view
        return notes.note(f"{key!r} in {place}", lambda: key in target)

    def __iter__(self) -> Iterator[Any]:
        place, target, notes = self._view
        if isinstance(target, Mapping):
            return iter(notes.note(f"list({place})", lambda: list(target)))
        if isinstance(target, (list, tuple)):
            return (self[number] for number in range(len(self)))
        return self._refuse(f"iterates over {place}")

    def __eq__(self, other: object) -> bool:
        _, target, _ = self._view
        return target is (other._view[1] if type(other) is View else other)

    def __hash__(self) -> int:
        return id(self._view[1])

    def _refuse(self, what: str) -> NoReturn:
        self._view[2].refuse(what)


class _Items:
    """Read a mapping's items through a view of it."""

    def __init__(self, view: View):
        self.view = view

    def get(self, key: Any, default: Any = None) -> Any:
        return self.view[key] if key in self.view else default  # noqa: SIM401

    def keys(self) -> list[Any]:
        return list(self.view)

    def values(self) -> list[Any]:
        return [self.view[key] for key in self.view]

    def items(self) -> list[tuple[Any, Any]]:
        return [(key, self.view[key]) for key in self.view]


class ViewOfNumbers(View):
    """View of an object some of whose values are inputs of the record."""

    __slots__ = ("_numbers",)

    def __init__(self, name: str, target: Any, notes: Notes, numbers: Mapping[str, Number]):
        super().__init__(name, target, notes)
        object.__setattr__(self, "_numbers", numbers)


class OptimizerView(ViewOfNumbers):
    """View of the optimizer; its learning rates are inputs of the record."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        place, target, notes = self._view
        if name == "optimizer":  # of a LightningOptimizer
            return self
        if name == "state":
            notes.refuse(f"reads {place}.state, of which the device holds the newest")
        if name == "param_groups":
            groups = enumerate(target.param_groups)
            return [_GroupView(f"{place}.param_groups[{n}]", g, notes, self._numbers[f"lr {n}"]) for n, g in groups]
        return super().__getattr__(name)


class _GroupView(View):
    __slots__ = ("_rate",)

    def __init__(self, name: str, target: Any, notes: Notes, rate: Number):
        super().__init__(name, target, notes)
        object.__setattr__(self, "_rate", rate)

    def __getitem__(self, key: Any) -> Any:
        return self._rate if key == "lr" else super().__getitem__(key)


class SchedulerView(ViewOfNumbers):
    """View of a scheduler; its last learning rates and step count are inputs of the record."""

    __slots__ = ("_label",)

    def __init__(self, name: str, target: Any, notes: Notes, numbers: Mapping[str, Number], label: str):
        super().__init__(name, target, notes, numbers)
        object.__setattr__(self, "_label", label)

    def __getattr__(self, name: str) -> Any:
        numbers, label = self._numbers, self._label
        if name in ("get_last_lr", "_last_lr") and f"{label} rate 0" in numbers:
            rates = [number for key, number in numbers.items() if key.startswith(f"{label} rate ")]
            return rates if name == "_last_lr" else lambda: rates
        if name == "last_epoch" and f"{label} count" in numbers:
            return numbers[f"{label} count"]
        return super().__getattr__(name)


def scheduler_numbers(scheduler: Any, label: str) -> dict[str, float]:
    """Return the numbers that a SchedulerView with this label has as inputs of the record."""
    rates = getattr(scheduler, "_last_lr", ())
    numbers: dict[str, float] = {f"{label} rate {place}": float(rate) for place, rate in enumerate(rates)}
    count = getattr(scheduler, "last_epoch", None)
    return numbers | ({f"{label} count": count} if type(count) is int else {})


def _now(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except (AttributeError, KeyError, IndexError):
        return _MISSING


def _copy(value: Any) -> Any:
    return list(value) if type(value) is list else value


def _same(old: Any, new: Any) -> bool:
    """Return True if two values are the same object, equal plain values, or lists of such."""
    if type(old) is list and type(new) is list:
        return len(old) == len(new) and all(map(_same, old, new))
    if isinstance(old, types.MethodType) and isinstance(new, types.MethodType):
        return old.__func__ is new.__func__ and old.__self__ is new.__self__
    if old is new:
        return True
    if not (is_plain(old) and is_plain(new) and type(old) is type(new)):
        return False
    return bool(old == new or (old != old and new != new))  # NaN equals NaN
