"""Settings that a compiled program takes as arrays, so that runs that differ in them share it.

A task names them in `Task.traced_hparams`. `put` hands a loss its coefficients: the config with arrays in their place.
A value that a model keeps from its construction, such as a dropout rate, is a `TracedFloat` there: `current` gives the
array that stands for it.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

Arrays = Mapping[str, Any]  # float32 scalars, int32 for a seed, by the setting's dotted key


class TracedFloat(float):
    """A float that knows which setting it is. Arithmetic gives a plain float, which is code and not an array."""

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
    """Inside, `current` gives these arrays."""
    token = _in_force.set(arrays)
    try:
        yield
    finally:
        _in_force.reset(token)


def current(value: Any) -> Any:
    """Return the array that stands for a TracedFloat inside `in_force`; return any other value as it is."""
    return _in_force.get().get(value.key, float(value)) if isinstance(value, TracedFloat) else value


def given(config: Any, keys: Sequence[str]) -> dict[str, np.generic]:
    """The settings among `keys` that can be arrays: numbers but 0, which compiles other code, and seeds."""
    found = {key: _get(config, key.split(".")) for key in keys}
    arrays: dict[str, np.generic] = {}
    for key, value in found.items():
        if isinstance(value, int):
            arrays[key] = np.int64(value).astype(np.int32)
        elif isinstance(value, float) and value:
            arrays[key] = np.float32(value)
    return arrays


def marked(config: Any, keys: Sequence[str]) -> Any:
    """The config that a model is built from: its varied floats are Numbers."""
    found = {key: _get(config, key.split(".")) for key in given(config, keys)}
    return put(config, {key: TracedFloat(value, key) for key, value in found.items() if isinstance(value, float)})


def put(config: Any, values: Mapping[str, Any]) -> Any:
    """The config with other values, unchecked: they may be arrays."""
    for key, value in values.items():
        config = _put(config, key.split("."), value)
    return config


def _get(section: Any, path: Sequence[str]) -> Any:
    for name in path:
        section = getattr(section, name)
    return section


def _put(section: Any, path: Sequence[str], value: Any) -> Any:
    head, *rest = path
    return section.model_copy(update={head: _put(getattr(section, head), rest, value) if rest else value})
