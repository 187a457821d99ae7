"""Imports at first use, so that torch, Pillow or matplotlib load only in the runs that need them."""

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class lazy:
    """A function that imports its module at the first call. target: "package.module:function"."""

    target: str

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        module, _, name = self.target.partition(":")
        return getattr(importlib.import_module(module), name)(*arguments, **named)


def lazy_attributes(package: str, names: Mapping[str, Iterable[str]]) -> Callable[[str], Any]:
    """Return a module `__getattr__` (PEP 562) that imports names at first use.

    package: `__name__` of the module that offers them. names: module, relative to the package, or with a leading ":"
    as it is -> names that it defines.
    """
    modules = {
        name: module[1:] if module.startswith(":") else f"{package}.{module}"
        for module, offered in names.items()
        for name in offered
    }

    def __getattr__(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)

    return __getattr__
