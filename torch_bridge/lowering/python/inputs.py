"""Watch the Python values that a recorded function may read: attributes of modules and settings, closures, globals.

A graph keeps the values of its capture. `PythonInputs` finds those that the code may read, by the names in the code,
and detects when one has changed.
"""

import collections
import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torch_bridge.lazy_scalar import LazyScalar
from torch_bridge.lowering.errors import unreadable
from torch_bridge.lowering.python.effects import Changes, Traces
from torch_bridge.lowering.python.places import CONTAINERS, Place, value_at
from torch_bridge.lowering.python.walk import MOST_ITEMS, Walk

MOST_WATCHED = 1 << 16  # of a longer list or dict, whose items are compared by identity


class _Named:
    """Attributes that may appear or vanish. wanted: the names that the code may read; None for any."""

    def __init__(self, name: str, held: Any, wanted: set[str] | None):
        self.name, self.held, self.wanted = name, held, wanted
        self._note()

    def _note(self) -> None:
        self.count, self._known = len(self.held), set() if self.wanted is None else set(self.held)

    def changed(self) -> bool:
        """Return True if the present names differ from the known ones in one that is wanted; else know the present."""
        if self.wanted is None or not self.wanted.isdisjoint(self._known.symmetric_difference(self.held)):
            return True
        self._note()
        return False


class PythonInputs:
    """Places from which a function and the modules that it calls may read plain values.

    places: of plain values. held: of tensors and arrays. registered: of the modules' parameters and buffers.
    """

    def __init__(self, function: Callable, modules: Mapping[str, torch.nn.Module]):
        self._root = function, dict(modules)
        self.look()

    def __deepcopy__(self, memo: Any) -> "PythonInputs":
        return self  # a copied record reads the same Python values

    def look(self) -> None:
        """Find the places anew."""
        names: set[str] = set()
        walk = Walk(names, *self._root)
        while not walk.found <= names:  # a function reads its arguments by its own names
            names |= walk.found
            walk = Walk(names, *self._root)
        self.places = _named_apart(walk.places)
        self.held, self.registered = walk.held, walk.registered
        self._linked = [(place, value_at(place)) for place in walk.links]
        self._forms = [(name, container, _form(container)) for name, container in walk.containers + walk.foreign]
        self._counts = [(name, held, len(held)) for name, held in walk.attributes]
        self._named = [_Named(name, held, wanted) for name, held, wanted in walk.named]
        self._of_tensors = [attributes for _, attributes in walk.tensors.values()]
        self._on_tensors = _count(self._of_tensors)
        self._walk = walk

    def values(self) -> list[Any]:
        """Return the current values, in the order of `places`."""
        try:
            return [container[key] for container, key, _ in self.places]
        except (KeyError, IndexError, ValueError):  # a place no longer exists
            return [value_at(place) for place in self.places]

    def named(self) -> dict[str, Any]:
        """Return the current values by their places' names."""
        return {place.name: value for place, value in zip(self.places, self.values(), strict=True)}

    def moved(self) -> list[str]:
        """Return the names of places and containers whose object or items have changed since the last look."""
        moved = [place.name for place, value in self._linked if value_at(place) is not value]
        moved += [name for name, attributes, count in self._counts if len(attributes) != count]
        moved += [named.name for named in self._named if len(named.held) != named.count and named.changed()]
        moved += ["an attribute of a tensor"] if _count(self._of_tensors) != self._on_tensors else []
        return moved + [name for name, container, form in self._forms if not _has_form(container, form)]

    def tensors(self) -> list[Any]:
        """Return the tensors and arrays that the code reaches."""
        tuples = [value for _, value in self._linked if type(value) is tuple]
        return [*map(value_at, (*self.held, *self.registered)), *(item for value in tuples for item in value)]

    @contextlib.contextmanager
    def effects(self) -> Iterator[Changes]:
        """While active, code runs to be recorded. Yields the Python state that it changed, which is undone.

        Raises UnsupportedModel before the code runs if some of its changes could not be undone.
        """
        walk = self._walk
        for value in map(value_at, self.held):
            if isinstance(value, LazyScalar):
                value.tensor()  # now: while code is captured, torch makes tensors without values
        places = [*self.places, *self.held, *self.registered, *(place for place, _ in self._linked)]
        tables = [*walk.tables, *walk.tensors.values()]
        try:
            traces = Traces(places, walk.containers + walk.attributes, tables, walk.generators)
        except Exception as error:
            raise unreadable("", None, error) from error
        with traces.of_code(walk.unfollowed) as changed:
            yield changed


def _count(attributes: Sequence[dict]) -> int:
    """Return the number of attributes of tensors, without our mark of those whose newest values are on the device, and
    without TorchDynamo's."""
    return sum(name != "_awaited" and not name.startswith("_dynamo_") for held in attributes for name in held)


def _named_apart(places: list[Place]) -> list[Place]:
    """Return the places, numbering repeated names so that each is unique."""
    seen: collections.Counter[str] = collections.Counter()
    apart = []
    for place in places:
        seen[place.name] += 1
        again = seen[place.name]
        apart.append(place if again == 1 else place._replace(name=f"{place.name} ({again})"))
    return apart


def _form(container: Any) -> Any:
    """Return what a look at a container depends on besides its places: a set's items, a dict's keys (tuple), the items
    of a long list or dict (list), else its length."""
    if isinstance(container, set):
        return frozenset(container)
    if isinstance(container, dict) and len(container) <= MOST_ITEMS:
        return tuple(container)
    if isinstance(container, CONTAINERS) and MOST_ITEMS < len(container) <= MOST_WATCHED:
        return _items(container)
    return len(container)


def _items(container: Any) -> list:
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


def _has_form(container: Any, form: Any) -> bool:
    if type(form) is int:
        return len(container) == form
    if type(form) is list:
        items = _items(container)
        return len(items) == len(form) and all(map(operator.is_, items, form))
    if len(container) != len(form):
        return False
    return container == form if type(form) is frozenset else all(map(container.__contains__, form))
