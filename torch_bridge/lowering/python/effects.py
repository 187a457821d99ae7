"""Find and undo all changes that code makes in Python while it is captured."""

import contextlib
import functools
import logging
import pickle
import random
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from torch_bridge.lowering.errors import Obstacle, UnsupportedModel, WritesOutside
from torch_bridge.lowering.python.names import OWN_STATE, of_library_file
from torch_bridge.lowering.python.places import Place, same, unwatched, value_at
from torch_bridge.lowering.recording_lock import RECORDING_LOCK

_SETTINGS = (str, bool, type(None), torch.dtype, torch.device)
ADVICE = "A record runs Python once, and every call has to: keep it out of the loss and the forward pass."


_OF_DYNAMO = "_dynamo_"  # attributes by which TorchDynamo marks tensors


class Changes(set[str]):
    """Names of the state that code has changed. settings: the places that it has set to a name or flag, and these."""

    def __init__(self) -> None:
        self.settings: list[tuple[Place, Any]] = []

    def note(self, values: Iterable[tuple[Place, Any]]) -> None:
        """Keep those of the new values that are settings."""
        self.settings += [(place, value) for place, value in values if isinstance(value, _SETTINGS)]


class Traces:
    """Snapshot of Python state before code runs; places, containers, tables and generators as PythonInputs finds
    them."""

    def __init__(
        self,
        places: Sequence[Place],
        containers: Sequence[tuple[str, Any]],
        tables: Sequence[tuple[str, dict]],
        generators: Sequence[tuple[str, Any]],
    ):
        self._places = [(place, value_at(place)) for place in places]
        self._containers = [(name, container, _shallow(container)) for name, container in containers]
        self._tables = [(name, table, set(table)) for name, table in tables]
        self._generators = [(name, generator, _state_of(generator)) for name, generator in generators]

    @contextlib.contextmanager
    def of_code(self, unfollowed: Sequence[str]) -> Iterator[Changes]:
        """While active, the code runs. Yields what it has changed, which is restored at the end.

        unfollowed: state that the code may change and that cannot be restored. Raises UnsupportedModel if there is any.
        """
        if unfollowed:
            raise UnsupportedModel("the code", [Obstacle(f"Python takes from or writes to {unfollowed[0]}")], ADVICE)
        changed = Changes()
        try:
            with RECORDING_LOCK, _without_logging():
                yield changed
        finally:
            self._put_back(changed)

    def _put_back(self, changed: Changes) -> None:
        for name, table, before in self._tables:
            for key in (key for key in table.keys() - before if not str(key).startswith(_OF_DYNAMO)):
                changed.add(f"{name}.{key}")
                del table[key]
        for name, container, items in self._containers:
            if not _same_items(items, container):
                changed.add(name)
                if isinstance(container, dict):
                    both = [(key, old, container[key]) for key, old in items.items() if key in container]
                    changed.note((Place(container, key, name), new) for key, old, new in both if not same(old, new))
                _refill(container, items)
        for place, old in self._places:
            if not same(old, value := value_at(place)):
                changed.add(place.name)
                changed.note([(place, value)])
                place.container[place.key] = old
        for name, generator, state in self._generators:
            if not _same_state(state, _state_of(generator)):
                changed.add(name)
                _set_state(generator, state)


class _Reading(threading.local):
    """Mark of a thread that runs code that may not write to a file."""

    active = False


_reading = _Reading()


@functools.cache
def _watch_files() -> None:
    """Look at every file that Python opens from now on, as an audit hook cannot be removed."""

    def look(event: str, arguments: tuple) -> None:
        if event == "open" and _reading.active:
            mode = arguments[1]
            writes = isinstance(mode, str) and not {*"wax+"}.isdisjoint(mode)
            if writes and not of_library_file(_opener(sys._getframe(1))):
                raise WritesOutside("it opens a file to write to, at every call")

    sys.addaudithook(look)


@contextlib.contextmanager
def only_reading() -> Iterator[None]:
    """While active, raise WritesOutside if user code in this thread opens a file for writing."""
    _watch_files()
    before, _reading.active = _reading.active, True
    try:
        yield
    finally:
        _reading.active = before


def _opener(frame: Any) -> str:
    """Return the file of the code that opens a file, directly or by a method of its Path."""
    while frame.f_globals.get("__name__", "").partition(".")[0] == "pathlib":
        frame = frame.f_back
    return frame.f_code.co_filename


@contextlib.contextmanager
def _without_logging() -> Iterator[None]:
    """While active, raise WritesOutside if user code is about to log."""
    factory = logging.getLogRecordFactory()

    def refuse(name: str, level: int, path: str, line: int, *args: Any, **kwargs: Any) -> logging.LogRecord:
        if name.partition(".")[0] not in OWN_STATE and not of_library_file(path):
            raise WritesOutside(f"it logs a line at every call, at {path}:{line}")
        return factory(name, level, path, line, *args, **kwargs)

    logging.setLogRecordFactory(refuse)
    try:
        yield
    finally:
        logging.setLogRecordFactory(factory)


def _shallow(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(unwatched(container))


def _same_items(before: Any, container: Any) -> bool:
    now = _shallow(container)
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return all(key in now and same(value, now[key]) for key, value in before.items())
    if isinstance(container, set):  # as sets: a refilled set may have another order
        return {(type(item), item) for item in before} == {(type(item), item) for item in now}
    return all(map(same, before, now))


def _refill(container: Any, items: Any) -> None:
    container.clear()
    (container.update if isinstance(container, (dict, set)) else container.extend)(items)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _same_state(old: Any, new: Any) -> bool:
    if isinstance(old, torch.Tensor):
        return torch.equal(old, new)
    return pickle.dumps(old) == pickle.dumps(new)
