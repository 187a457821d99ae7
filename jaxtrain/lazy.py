"""Imports at first use, so that torch, Pillow or matplotlib load only in the runs that need them."""

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


class lazy:
    """A function that imports its module at the first call. target: "package.module:function"."""

    __slots__ = (
        "target",
        "__weakref__",
    )  # no dataclass: importing dataclasses is half of the time until a command handles its signals

    def __init__(self, target: str):
        self.target = target

    def __eq__(self, other: object) -> bool:
        return isinstance(other, lazy) and self.target == other.target

    def __hash__(self) -> int:
        return hash(self.target)

    def __repr__(self) -> str:
        return f"lazy({self.target!r})"

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.function(*arguments, **named)

    @property
    def function(self) -> Callable:
        """The function itself; its module is imported now."""
        module, _, name = self.target.partition(":")
        return getattr(_imported(module), name)


def _imported(module: str) -> Any:
    """Import a module and leave Python's and NumPy's random states as they are: libraries draw numbers as they load,
    and a loop that has set its seeds before would go on with others than in torch."""
    python, numpy = sys.modules.get("random"), getattr(sys.modules.get("numpy"), "random", None)
    states = python and python.getstate(), numpy and numpy.get_state()
    try:
        return importlib.import_module(module)
    finally:
        if python:
            python.setstate(states[0])
        if numpy:
            numpy.set_state(states[1])


def lazy_attributes(package: str, names: Mapping[str, Iterable[str]]) -> Callable[[str], Any]:
    """Return a module `__getattr__` (PEP 562) that imports names at first use.

    package: `__name__` of the module that offers them. names: module -> names that it defines; a module is relative to
    the package, or absolute with a leading ":".
    """
    modules = {
        name: module[1:] if module.startswith(":") else f"{package}.{module}"
        for module, offered in names.items()
        for name in offered
    }

    def __getattr__(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(_imported(modules[name]), name)

    return __getattr__
