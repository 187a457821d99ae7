"""Show the user's own code the types that it sees in torch, while a module is recorded.

Torch gives a record tensors of a class of its own, and sizes that are no int. User code that asks for their type would
take another branch than in torch. Libraries know all of them and see the real types.
"""

import builtins
import contextlib
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from torch_bridge.lowering.python.names import OWN_STATE, of_library_file

_NUMBERS: dict[type, Any] = {torch.SymInt: 1, torch.SymFloat: 1.0, torch.SymBool: True}
_IDS: dict[int, int] = {}  # of a parameter, by that of what stands for it


def _type(*arguments: Any, **options: Any) -> Any:
    if len(arguments) != 1 or options:
        return builtins.type(*arguments, **options)
    value, kind = arguments[0], builtins.type(arguments[0])
    if kind in (FakeTensor, FunctionalTensor):
        return torch.nn.Parameter if isinstance(value, torch.nn.Parameter) else torch.Tensor
    return builtins.type(_NUMBERS[kind]) if kind in _NUMBERS else kind


def _id(value: Any) -> int:
    return _IDS.get(id(value), id(value))


def _is_instance(value: Any, kinds: Any) -> bool:
    if isinstance(kinds, tuple):
        return any(_is_instance(value, kind) for kind in kinds)
    kinds = builtins.type if kinds is _type else kinds
    number = _NUMBERS.get(builtins.type(value))
    return isinstance(value, kinds) or (number is not None and isinstance(number, kinds))


@contextlib.contextmanager
def with_ids(ids: Mapping[int, int]) -> Iterator[None]:
    """While active, `id` is for user code that of a parameter. ids: by that of what stands for the parameter."""
    _IDS.update(ids)
    try:
        yield
    finally:
        _IDS.clear()


@contextlib.contextmanager
def as_in_torch() -> Iterator[None]:
    """While active, functions of this file stand in the globals of user modules, before the builtins."""
    shown = {"type": _type, "isinstance": _is_instance, "id": _id}
    changed = [(names, key) for names in _globals_of_users() for key in shown if key not in names]
    try:
        for names, key in changed:
            names[key] = shown[key]
        yield
    finally:
        for names, key in changed:
            names.pop(key, None)


def _globals_of_users() -> list[dict[str, Any]]:
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) if isinstance(module, types.ModuleType) else ""
        own = name.partition(".")[0] not in OWN_STATE and not of_library_file(file) if file else name == "__main__"
        if own:
            found[id(module)] = vars(module)  # a script's module has two names
    return list(found.values())
