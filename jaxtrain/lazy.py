"""Imports at first use, so that torch, Pillow or matplotlib load only in the runs that need them."""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


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


def _defined_in(value: Any, module: str) -> bool:
    return getattr(value, "__module__", None) == module


def library_names(module: str, *libraries: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a module that hands on the public names and submodules of libraries.

    module: its `__name__`; its own names and submodules come first, then those of the first library. `from module
    import *` gives all of them.
    """

    def __dir__() -> list[str]:
        names = {name for name, value in vars(sys.modules[module]).items() if _defined_in(value, module)}
        for library in map(_imported, libraries):
            names |= set(getattr(library, "__all__", ())) or set(dir(library))
        return sorted(name for name in names if not name.startswith("_"))

    def __getattr__(name: str) -> Any:
        if name == "__all__":
            return __dir__()
        if not name.startswith("_") or name == "__version__":
            for library in (module, *libraries):
                loaded = _imported(library)
                if library != module and hasattr(loaded, name):
                    return getattr(loaded, name)
                if hasattr(loaded, "__path__") and importlib.util.find_spec(f"{library}.{name}") is not None:
                    return _imported(f"{library}.{name}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}, nor has {' or '.join(libraries)}")

    return __getattr__, __dir__


def signature_of(original: Callable[P, R]) -> Callable[[Callable[..., Any]], Callable[P, R]]:
    """Return a decorator that shows a function, which passes its arguments on, with another's parameters: to type
    checkers, editors, help() and what builds command lines from signatures."""
    return functools.wraps(original, assigned=("__annotations__",), updated=())
