"""Places where Python code keeps values: variables, attributes and items, each read and written like a dict's entry."""

import array
import collections
import ctypes
import enum
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from torch_bridge.lowering.errors import CannotRecord, unreadable

ARRAYS = (torch.Tensor, np.ndarray)
CONTAINERS = (list, dict, set, collections.deque)
BYTES = (array.array, bytearray, memoryview, ctypes.Structure.__mro__[1])  # the last is that of all ctypes objects
SIMPLE = (bool, int, float, complex, str, bytes, type(None))
PLAIN = (*SIMPLE, np.generic, enum.Enum, torch.dtype, torch.device, range)

METHODS = (  # what a class has as its code, not as values
    types.FunctionType,
    property,
    classmethod,
    staticmethod,
    functools.cached_property,
    functools.partialmethod,
    functools.singledispatchmethod,
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
)


class Place(NamedTuple):
    """Place of a value: container[key]. name: as it is written in the code."""

    container: Any
    key: Any
    name: str


class Cell:
    """A variable of an enclosing function."""

    def __init__(self, cell: types.CellType):
        self.cell = cell

    def __getitem__(self, key: Any) -> Any:
        return self.cell.cell_contents

    def __setitem__(self, key: Any, value: Any) -> None:
        self.cell.cell_contents = value

    def __len__(self) -> int:
        """Return 0 before the variable has a value, else 1."""
        try:
            return int(self.cell.cell_contents is not self)
        except ValueError:
            return 0


class OfTensor:
    """Attributes that code has set on a tensor. A record sees them as they were when it began."""

    def __init__(self, tensor: torch.Tensor):
        self._values = vars(tensor)

    def __getitem__(self, key: Any) -> Any:
        return self._values[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._values[key] = value


class Absent:
    """Names that functions read from their globals before anything has them."""

    def __init__(self, scope: Mapping[str, Any], names: frozenset[str]):
        self.scope, self.names = scope, names

    def __len__(self) -> int:
        return sum(name in self.scope for name in self.names)


class ClassValue:
    """Attributes of an object's class, which attributes of the object may come to shadow."""

    def __init__(self, owner: Any):
        self.owner = owner

    def __getitem__(self, key: Any) -> Any:
        for scope in (self.owner, *type(self.owner).__mro__):
            if key in getattr(scope, "__dict__", ()):
                return vars(scope)[key]
        raise KeyError(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(self.owner, type):  # of a metaclass
            setattr(type(self.owner), key, value)
        elif inspect.getattr_static(type(self.owner), key) is value:
            vars(self.owner).pop(key, None)
        else:
            vars(self.owner)[key] = value


class TypeValues:
    """Attributes of a class."""

    def __init__(self, kind: type):
        self.kind = kind

    def __getitem__(self, key: Any) -> Any:
        return vars(self.kind)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        setattr(self.kind, key, value)


class Methods:
    """Methods of a class, its own and inherited ones."""

    def __init__(self, kind: type):
        self.kind = kind

    def __getitem__(self, key: Any) -> Any:
        for base in self.kind.__mro__:
            if key in vars(base):
                return vars(base)[key]
        raise KeyError(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if key in vars(self.kind):
            delattr(self.kind, key)
        if value_at(Place(self, key, "")) is not value:
            setattr(self.kind, key, value)


class Slots:
    """Attributes of an object that has no `__dict__`."""

    def __init__(self, owner: Any):
        self.owner = owner

    def __getitem__(self, key: Any) -> Any:
        try:
            return object.__getattribute__(self.owner, key)
        except AttributeError:
            raise KeyError(key) from None

    def __setitem__(self, key: Any, value: Any) -> None:
        object.__setattr__(self.owner, key, value)

    def __len__(self) -> int:
        return len(self.keys())

    def keys(self) -> list[str]:
        """Return the names of the slots that are set."""
        slots = [name for kind in type(self.owner).__mro__ for name in _listed(vars(kind).get("__slots__", ()))]
        return [name for name in slots if not name.startswith("__") and self._is_set(name)]

    def _is_set(self, name: str) -> bool:
        try:
            object.__getattribute__(self.owner, name)
        except Exception:  # not set, or a property in a slot's place that raises
            return False
        return True


class Contents:
    """The bytes of an array.array, a bytearray, a memoryview or a ctypes object, as the only item."""

    def __init__(self, owner: Any):
        self.owner = owner

    def __getitem__(self, key: Any) -> bytes:
        return bytes(self.owner)

    def __setitem__(self, key: Any, value: bytes) -> None:
        (ctypes.c_char * len(value)).from_buffer(self.owner).raw = value


class DefaultType:
    """torch's default floating-point type, as the only item."""

    def __getitem__(self, key: Any) -> torch.dtype:
        return torch.get_default_dtype()

    def __setitem__(self, key: Any, value: torch.dtype) -> None:
        torch.set_default_dtype(value)


def guarded(visit: Callable) -> Callable:
    """Return a visit of an object that raises CannotRecord for whatever the object raises when it is looked at: its
    class may answer `__class__`, `__len__` or `__iter__` with code of its own."""

    @functools.wraps(visit)
    def visited(self: Any, *given: Any) -> None:
        try:
            visit(self, *given)
        except CannotRecord:
            raise
        except ReferenceError:
            pass  # a weak reference to what no longer is leads nowhere
        except Exception as error:
            *_, value, name, _, _ = given
            raise unreadable(name, value, error) from error

    return visited


def attributes_of(value: Any) -> dict | None:
    """Return an object's `__dict__`; None if it has none. Its own `__getattr__`, which may answer any name, is not
    asked."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except Exception:  # no such attribute, or a property of the user's that raises
        return None
    return found if isinstance(found, dict) else None


def _listed(slots: Any) -> Any:
    return (slots,) if isinstance(slots, str) else slots


def value_at(place: Place) -> Any:
    """Return the place's current value; None if there is none."""
    try:
        return place.container[place.key]
    except (KeyError, IndexError, ValueError):
        return None


def unwatched(container: Any) -> Any:
    """Return an iterable of a container's items that runs no code of a user's own list class, which may count reads."""
    return list.__iter__(container) if isinstance(container, list) else container


def is_plain(value: Any) -> bool:
    """Return True for a value that is compared by `==`, not by identity."""
    return isinstance(value, PLAIN) or (isinstance(value, tuple) and all(isinstance(item, PLAIN) for item in value))


def same(old: Any, new: Any) -> bool:
    """Return True for the same object, and for plain values that are equal."""
    return old is new or (is_plain(old) and type(new) is type(old) and is_plain(new) and bool(new == old))
