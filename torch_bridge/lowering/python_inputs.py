"""Numbers that a recorded function reads from Python: attributes of modules and settings, closures, globals.

A record keeps them as they were. `PythonInputs` finds those that the code may read and tells when one has changed.
`Varying` decides what a change means: a number becomes an input of the compiled step, anything else another record.
"""

import collections
import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from torch_bridge.lowering.python_names import (
    OWN_STATE,
    class_functions,
    class_names,
    globals_of,
    methods,
    names_of,
    of_library,
    of_library_module,
    on_host,
)

ARRAYS = (torch.Tensor, np.ndarray)
CONTAINERS = (list, dict, set, collections.deque)
SIMPLE = (bool, int, float, complex, str, bytes, type(None))
MOST_ITEMS = 64  # of a list or dict that is looked into
DEPTH = 3  # objects inside objects
_OF_EVERY_MODULE = set(vars(torch.nn.Module()))


class Place(NamedTuple):
    """Where a value is kept: container[key]. name: as the code calls it."""

    container: Any
    key: Any
    name: str


class _Cell:
    """A variable of an enclosing function, read and written like a dict's entry."""

    def __init__(self, cell: types.CellType):
        self.cell = cell

    def __getitem__(self, key: Any) -> Any:
        return self.cell.cell_contents

    def __setitem__(self, key: Any, value: Any) -> None:
        self.cell.cell_contents = value


class _ClassValue:
    """A value of an object's class that the object may come to shadow, read and written like a dict's entry."""

    def __init__(self, owner: Any):
        self.owner = owner

    def __getitem__(self, key: Any) -> Any:
        for scope in (self.owner, *type(self.owner).__mro__):
            if key in vars(scope):
                return vars(scope)[key]
        raise KeyError(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if inspect.getattr_static(type(self.owner), key) is value:
            vars(self.owner).pop(key, None)
        else:
            vars(self.owner)[key] = value


class _TypeValues:
    """The values of a class, read and written like a dict's entries."""

    def __init__(self, kind: type):
        self.kind = kind

    def __getitem__(self, key: Any) -> Any:
        return vars(self.kind)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        setattr(self.kind, key, value)


class PythonInputs:
    """The places that a function and the modules that it calls may read plain values from."""

    def __init__(self, function: Callable, modules: Mapping[str, torch.nn.Module]):
        self.places: list[Place] = []
        self.held: list[Place] = []  # where tensors and arrays are kept
        self.registered: list[Place] = []  # where modules keep their parameters and buffers
        self.containers: list[tuple[str, Any]] = []  # lists, dicts, sets, and the attributes of objects
        self._machinery: set[int] = set()
        self._seen: set[int] = set()
        names = self._callable(function, "", set(), 0)
        for label, module in modules.items():
            self._module(module, "" if len(modules) == 1 else label, names)

    def values(self) -> list[Any]:
        """Return the present values, in the places' order."""
        try:
            return [container[key] for container, key, _ in self.places]
        except (KeyError, IndexError, ValueError):  # one is gone
            return [value_at(place) for place in self.places]

    @contextlib.contextmanager
    def replaced(self, numbers: Sequence[int], values: Sequence[Any]) -> Iterator[None]:
        """While active, these places hold these values."""
        before = [value_at(self.places[number]) for number in numbers]
        try:
            for number, value in zip(numbers, values, strict=True):
                self.places[number].container[self.places[number].key] = value
            yield
        finally:
            for number, value in zip(numbers, before, strict=True):
                self.places[number].container[self.places[number].key] = value

    @contextlib.contextmanager
    def effects(self) -> Iterator[set[str]]:
        """While active, code runs to be recorded. Gives the names of what it changed in Python, which is put back."""
        tensors = [*self.held, *self.registered]
        values, held = self.values(), [value_at(place) for place in tensors]
        kept = [(name, container, _shallow(container)) for name, container in self.containers]
        changed: set[str] = set()
        try:
            yield changed
        finally:
            for name, container, items in kept:
                if not _same_items(items, container):
                    changed.add(name)
                    _refill(container, items)
            for places, before in ((self.places, values), (tensors, held)):
                for place, old in zip(places, before, strict=True):
                    new = value_at(place)
                    if not _same_item(old, new):
                        changed.add(place.name)
                        place.container[place.key] = old

    def _callable(self, value: Any, label: str, names: set[str], depth: int) -> set[str]:
        """Visit what a function reads; return the names in its code."""
        if isinstance(value, functools.partial):
            for place, item in enumerate(value.args):
                self._inside(item, f"{label}({place})", names, depth)
            self._visit_items(value.keywords, value.keywords.items(), label, names, depth)
            value = value.func
        owner = getattr(value, "__self__", None)
        function = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else None
        if not isinstance(function, types.FunctionType):
            if function is not None and not isinstance(value, (type, types.BuiltinFunctionType)):
                self._inside(value, label, names | {"__call__"}, depth)  # an object that is called
            return names
        names = names | names_of(function.__code__)
        if owner is not None and not isinstance(owner, types.ModuleType):
            names = names | methods(type(owner), names)
            self._inside(owner, "self", names, depth)
        self._reads(function, names, depth)
        return names

    def _reads(self, function: types.FunctionType, names: set[str], depth: int) -> None:
        """Visit a function's closure, defaults and globals."""
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not assigned yet
                self._visit(_Cell(cell), name, cell.cell_contents, name, names, depth)
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for number, item in enumerate(item for item in defaults if not isinstance(item, SIMPLE)):
            self._inside(item, f"default {number} of {function.__name__}", names, depth)
        scope, loaded = function.__globals__, globals_of(function.__code__)
        for name in sorted(names & scope.keys()):
            if name in loaded or not isinstance(scope[name], ARRAYS):  # else an attribute of that name is meant
                self._visit(scope, name, scope[name], name, names, depth)

    def _visit(self, container: Any, key: Any, value: Any, name: str, names: set[str], depth: int) -> None:
        if isinstance(value, SIMPLE) or (isinstance(value, tuple) and all(isinstance(item, SIMPLE) for item in value)):
            self.places.append(Place(container, key, name))
        elif isinstance(value, ARRAYS):
            self.held.append(Place(container, key, name))
        else:
            self._inside(value, name, names, depth)

    def _inside(self, value: Any, name: str, names: set[str], depth: int) -> None:
        if isinstance(value, torch.Tensor) or id(value) in self._seen or depth > DEPTH:
            return
        self._seen.add(id(value))
        if isinstance(value, (type, types.ModuleType)):
            if not of_library_module(value.__module__ if isinstance(value, type) else value):
                container = _TypeValues(value) if isinstance(value, type) else vars(value)
                for key in sorted(names & vars(value).keys()):
                    if not isinstance(vars(value)[key], (types.FunctionType, property, classmethod, staticmethod)):
                        self._visit(container, key, vars(value)[key], f"{name}.{key}", names, depth + 1)
            return
        if isinstance(value, torch.nn.Module):
            self._seen.discard(id(value))
            self._module(value, name, names)
            return
        if isinstance(value, CONTAINERS) and id(value) not in self._machinery:
            self.containers.append((name, value))
        if isinstance(value, (set, collections.deque)):
            return
        if isinstance(value, (list, dict)):
            if len(value) <= MOST_ITEMS:
                items = value.items() if isinstance(value, dict) else enumerate(value)
                self._visit_items(value, items, name, names, depth)
        elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            if not of_library(value):
                self._callable(value, name, names, depth + 1)
        elif hasattr(value, "__dict__"):
            wanted = names | methods(type(value), names)
            if type(value).__module__.partition(".")[0] in OWN_STATE:
                self._machinery |= {id(item) for item in vars(value).values() if isinstance(item, CONTAINERS)}
            else:
                self.containers.append((name, vars(value)))
            for key, item in list(vars(value).items()):
                if key in wanted:
                    self._visit(vars(value), key, item, f"{name}.{key}", wanted, depth + 1)
            self._class_values(value, name, wanted)

    def _visit_items(self, container: Any, items: Any, name: str, names: set[str], depth: int) -> None:
        for key, item in list(items):
            self._visit(container, key, item, f"{name}[{key!r}]", names, depth + 1)

    def _module(self, module: torch.nn.Module, label: str, names: set[str]) -> None:
        for path, inner in module.named_modules():
            if id(inner) in self._seen or on_host(type(inner)):
                continue
            self._seen.add(id(inner))
            wanted = (names | class_names(type(inner))) - _OF_EVERY_MODULE
            prefix = ".".join(filter(None, (label, path))) or type(module).__name__
            for key, item in list(vars(inner).items()):
                if key in wanted:
                    self._visit(vars(inner), key, item, f"{prefix}.{key}", wanted, 1)
            for table in (inner._parameters, inner._buffers):
                self.registered += [Place(table, key, f"{prefix}.{key}") for key in table]
            if not type(inner).__module__.startswith("torch.nn."):
                self._class_values(inner, prefix, wanted)
            for function in class_functions(type(inner)):
                if not of_library(function) and id(function) not in self._seen:
                    self._seen.add(id(function))
                    self._reads(function, names_of(function.__code__), 1)
            for hook in _hooks_of(inner):
                if not of_library(hook):
                    self._callable(hook, f"a hook of {prefix}", set(), 1)

    def _class_values(self, owner: Any, name: str, wanted: set[str]) -> None:
        for base in type(owner).__mro__[:-1]:
            for key in wanted & vars(base).keys() - vars(owner).keys() - _OF_EVERY_MODULE:
                value = vars(base)[key]
                if isinstance(value, SIMPLE) and inspect.getattr_static(type(owner), key) is value:
                    self.places.append(Place(_ClassValue(owner), key, f"{name}.{key}"))


class Varying:
    """Follow the values of a function's Python inputs from call to call.

    dynamic: numbers that have changed, now inputs of the compiled step, in order. fixed: other values that have
    changed: each combination has a record of its own.
    """

    def __init__(self, function: Callable, modules: Mapping[str, torch.nn.Module]):
        self.inputs = PythonInputs(function, modules)
        self.dynamic: list[int] = []
        self.fixed: set[int] = set()
        self._ignored: set[int] = set()
        self._last = self.inputs.values()
        self._state: tuple[tuple, list[Any]] = (((), ()), [])

    def state(self) -> tuple[tuple, list[Any]]:
        """Return a key of what has to be recorded apart, and the dynamic numbers as 0-d arrays."""
        values = self.inputs.values()
        if values != self._last:
            for number, (old, new) in enumerate(zip(self._last, values, strict=True)):
                if old != new and number not in self._ignored and number not in self.fixed:
                    self._take(number, old, new)
            self._last = values
            self._renew()
        return self._state

    def _take(self, number: int, old: Any, new: Any) -> None:
        if not (_is_number(old) and _is_number(new)):
            self.fixed.add(number)
            if number in self.dynamic:
                self.dynamic.remove(number)
        elif number not in self.dynamic:
            self.dynamic.append(number)

    def _renew(self) -> None:
        constant = tuple((number, _key(self._last[number])) for number in sorted(self.fixed))
        self._state = (tuple(self.dynamic), constant), self.arrays(self.dynamic)

    def arrays(self, numbers: Sequence[int]) -> list[np.ndarray]:
        """Return the last values of these places, as 0-d arrays."""
        return [_array(self._last[number]) for number in numbers]

    def branch_on(self, numbers: Sequence[int]) -> None:
        """Take these dynamic numbers for values that Python itself needs, from now on."""
        self.dynamic = [number for number in self.dynamic if number not in numbers]
        self.fixed.update(numbers)
        self._renew()

    def ignore(self, numbers: Sequence[int]) -> None:
        """Take these dynamic numbers for values that nothing reads."""
        self.dynamic = [number for number in self.dynamic if number not in numbers]
        self._ignored.update(numbers)
        self._renew()

    def names(self, numbers: Sequence[int]) -> str:
        """Return the places' names, for a message."""
        return ", ".join(self.inputs.places[number].name for number in numbers)


def _hooks_of(module: torch.nn.Module) -> list[Callable]:
    tables = [module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks]
    tables += [parameter._backward_hooks or {} for parameter in module.parameters(recurse=False)]
    return [hook for table in tables for hook in table.values()]


def _shallow(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _same_items(before: Any, container: Any) -> bool:
    now = _shallow(container)
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return all(key in now and _same_item(value, now[key]) for key, value in before.items())
    return all(map(_same_item, before, now))


def _same_item(old: Any, new: Any) -> bool:
    return old is new or (isinstance(old, SIMPLE) and type(new) is type(old) and new == old)


def _refill(container: Any, items: Any) -> None:
    container.clear()
    (container.update if isinstance(container, (dict, set)) else container.extend)(items)


def value_at(place: Place) -> Any:
    """Return the value that is kept there now; None where there is none."""
    try:
        return place.container[place.key]
    except (KeyError, IndexError, ValueError):
        return None


def _key(value: Any) -> Any:
    return value if isinstance(value, (*SIMPLE, tuple)) else id(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _array(value: Any) -> np.ndarray:
    return np.asarray(value, np.float32 if isinstance(value, float) else np.int64)
