"""Settings that a compiled program takes as arrays, so that runs that differ only in them share the program.

A task names them in `Task.traced_hparams`. `put` gives a loss its coefficients: a config with arrays in place of the
settings. A value that a model stores when it is built, such as a dropout rate, is a `TracedFloat`: `current` returns
the array for it. A number inside a recorded torch graph, which no setting holds, has a key that begins with "#"
(`Task.graph_numbers`): `number` returns its array.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

OF_GRAPH = "#"  # begins the key of a number that a recorded graph holds
Arrays = Mapping[str, Any]  # float32 scalars, int32 for a seed, by the setting's dotted key


class TracedFloat(float):
    """A float with the key of its setting. Arithmetic returns a plain float, which is compiled in as a constant."""

    key: str

    def __new__(cls, value: float, key: str):
        number = super().__new__(cls, value)
        number.key = key
        return number

    def __getnewargs__(self):
        return float(self), self.key


_in_force: contextvars.ContextVar[Arrays] = contextvars.ContextVar("varied", default={})  # noqa: B039 (never written)


@contextlib.contextmanager
def in_force(arrays: Arrays) -> Iterator[None]:
    """Make `current` return these arrays in this context."""
    token = _in_force.set(arrays)
    try:
        yield
    finally:
        _in_force.reset(token)


def current(value: Any) -> Any:
    """Return the array for a TracedFloat inside `in_force` (else its float); return any other value unchanged."""
    return _in_force.get().get(value.key, float(value)) if isinstance(value, TracedFloat) else value


def number(key: str, otherwise: Any) -> Any:
    """Return the array with this key inside `in_force`, else `otherwise`."""
    return _in_force.get().get(key, otherwise)


def given(config: Any, keys: Sequence[str]) -> dict[str, np.generic]:
    """Return the settings among `keys` that can be arrays: ints (seeds), and floats other than 0, which compiles
    different code."""
    found = {key: _get(config, key.split(".")) for key in keys}
    arrays: dict[str, np.generic] = {}
    for key, value in found.items():
        if isinstance(value, int):
            arrays[key] = np.int64(value).astype(np.int32)
        elif isinstance(value, float) and value:
            arrays[key] = np.float32(value)
    return arrays


def marked(config: Any, keys: Sequence[str]) -> Any:
    """Return the config to build a model from: its traced float settings are TracedFloats."""
    found = {key: _get(config, key.split(".")) for key in given(config, keys)}
    return put(config, {key: TracedFloat(value, key) for key, value in found.items() if isinstance(value, float)})


def put(config: Any, values: Mapping[str, Any]) -> Any:
    """Return the config with some values replaced, without validation: they may be arrays. Numbers
    of a graph are left out."""
    for key, value in values.items():
        if not key.startswith(OF_GRAPH):
            config = _put(config, key.split("."), value)
    return config


def _get(section: Any, path: Sequence[str]) -> Any:
    for name in path:
        section = getattr(section, name)
    return section


def _put(section: Any, path: Sequence[str], value: Any) -> Any:
    head, *rest = path
    return section.model_copy(update={head: _put(getattr(section, head), rest, value) if rest else value})
