"""Objects that a function's code or a module leads to: by a path of names, by an import, as a hook."""

import contextlib
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torch_bridge.lowering.python.names import imports_of
from torch_bridge.lowering.python.places import attributes_of


def hooks_of(module: torch.nn.Module) -> list[Callable]:
    tables = [module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks]
    tables += [parameter._backward_hooks or {} for parameter in module.parameters(recurse=False)]
    return [hook for table in tables for hook in table.values()]


def named(scope: Mapping[str, Any], path: str) -> Any:
    """Return the object that a function's globals hold under a path such as torch.nn.functional; None if none."""
    first, *attributes = path.split(".")
    found = scope.get(first)
    for attribute in attributes:
        held = vars(found) if isinstance(found, (type, types.ModuleType)) else attributes_of(found) or {}
        found = held.get(attribute)
    return found


def imported(function: types.FunctionType) -> set[str]:
    """Return the names of the loaded modules that a function imports as it runs."""
    package = function.__globals__.get("__package__") or ""
    found = set()
    for name, level in imports_of(function.__code__):
        with contextlib.suppress(ImportError):  # a relative import outside of a package
            parts = (importlib.util.resolve_name("." * level + name, package) if level else name).split(".")
            found |= {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    return found & sys.modules.keys()
