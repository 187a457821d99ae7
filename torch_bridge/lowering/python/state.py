"""Detect what a module's call changes in Python, and undo it: capture runs the code once, and every call has to."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from torch_bridge.lowering.python import assigned_buffers
from torch_bridge.lowering.python.places import Place

OF_EVERY_MODULE = set(vars(torch.nn.Module())) | {"forward"}  # torch watches buffers and parameters
_DEPTH = 3  # of containers nested in containers


class Watch:
    """Detect changes that a module's call makes in Python: attributes of its submodules, random generators.

    changed: (module, its path, attribute, value before, value after).
    """

    def __init__(self, module: torch.nn.Module):
        self.module = module
        self.before = _snapshot(module)
        self.hooks = _hooks_of(module)
        self.generators = random.getstate(), np.random.get_state()
        self.changed: list[tuple[torch.nn.Module, str, str, Any, Any]] = []
        self.misfits: list[str] = []  # registrations and replacements that no record keeps

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Watch a call: what it changes in the modules' attributes, and what it registers."""
        self.changed, self.misfits = [], []
        registered = assigned_buffers.registered(self.module)
        try:
            yield
        finally:
            self.misfits += assigned_buffers.put_back(self.module, registered)
            after = _snapshot(self.module)
            for key, (module, path, name, old) in self.before.items():
                new = after[key][3] if key in after else None
                if not _same(old, new):
                    self.changed.append((module, path, name, old, new))
            for key, (module, path, name, new) in after.items():
                if key not in self.before:
                    self.changed.append((module, path, name, None, new))

    def names(self) -> list[str]:
        """Return the attributes that the call changes, with their modules' paths."""
        return [
            f"{path}.{name}".removeprefix(".")
            for module, path, name, _, _ in self.changed
            if not computed_anew(module, name)
        ]

    def values(self) -> Iterator[tuple[Place, Any]]:
        """Yield the places of attributes, and of items of dicts in them, that the call sets anew, and their values."""
        for module, path, name, old, new in self.changed:
            if (id(module), name) in self.before:
                yield Place(vars(module), name, f"{path}.{name}"), new
            if isinstance(old, _Container) and isinstance(new, _Container) and isinstance(old.held, dict):
                changed = (key for key in old.held.keys() & new.held.keys() if not _same(old.held[key], new.held[key]))
                yield from ((Place(old.owner, key, f"{path}.{name}"), new.held[key]) for key in changed)

    def restore(self) -> None:
        """Put every attribute, hook and the random generators back as they were before the call."""
        _put_hooks(self.hooks)  # transformers' modules register and note some at their first call
        random.setstate(self.generators[0])
        np.random.set_state(self.generators[1])
        for key, (module, _, name, _) in _snapshot(self.module).items():
            if key not in self.before:
                vars(module).pop(name, None)
        for module, _, name, old in self.before.values():
            _put(module, name, old)


def computed_anew(module: torch.nn.Module, name: str) -> bool:
    """Return True for the weight that torch's weight_norm and spectral_norm set before every forward pass, and for the
    lists in which a recurrent layer keeps its parameters a second time."""
    if isinstance(module, torch.nn.RNNBase) and name in ("_flat_weights", "_flat_weight_refs"):
        return True
    hooks = module._forward_pre_hooks.values()
    return any(type(h).__module__.startswith("torch.nn.utils.") and getattr(h, "name", "") == name for h in hooks)


def _hooks_of(module: torch.nn.Module) -> list[tuple[dict, dict]]:
    """Return every table of hooks of the module and its parts, each with a copy of its contents."""
    named = [item for inner in module.modules() for item in vars(inner).items()]
    tables = [table for name, table in named if "_hooks" in name and isinstance(table, dict)]
    return [(table, dict(table)) for table in tables]


def _put_hooks(tables: list[tuple[dict, dict]]) -> None:
    for table, held in tables:
        table.clear()
        table.update(held)


def _snapshot(module: torch.nn.Module) -> dict[tuple, tuple]:
    """Return (module, attribute) -> module, its path, attribute, and the value with copies of its containers."""
    found = {}
    for path, inner in module.named_modules():
        path = path.removeprefix("wrapped_module").removeprefix(".")
        for name, value in vars(inner).items():
            if name not in OF_EVERY_MODULE:
                found[id(inner), name] = (inner, path, name, _copy(value))
    return found


def _copy(value: Any, depth: int = _DEPTH) -> Any:
    if depth and type(value) is set:
        return _Container(value, frozenset(value))  # not in order: a refilled set may have another
    if depth and type(value) in (list, tuple):
        return _Container(value, [_copy(item, depth - 1) for item in value])
    if depth and issubclass(type(value), dict):  # isinstance() would run an object's own __class__
        return _Container(value, {key: _copy(item, depth - 1) for key, item in value.items()})
    return value


class _Container:
    """A list, tuple, set or dict, and a copy of what it held."""

    def __init__(self, owner: Any, held: Any):
        self.owner, self.held = owner, held


def _same(old: Any, new: Any) -> bool:
    if type(old) is _Container and type(new) is _Container:
        if type(old.held) is not type(new.held) or len(old.held) != len(new.held):
            return False
        if isinstance(old.held, dict):
            return old.held.keys() == new.held.keys() and all(_same(old.held[k], new.held[k]) for k in old.held)
        if isinstance(old.held, frozenset):
            return old.held == new.held
        return all(_same(a, b) for a, b in zip(old.held, new.held, strict=True))
    if old is new:
        return True
    plain = (int, float, complex, bool, str, bytes, np.generic)
    return type(old) is type(new) and issubclass(type(old), plain) and (old == new or old != old)


def _put(module: torch.nn.Module, name: str, value: Any) -> None:
    vars(module)[name] = _whole(value)


def _whole(value: Any) -> Any:
    """Return the saved value; its containers are the original objects, holding again what they held."""
    if type(value) is not _Container:
        return value
    owner, held = value.owner, value.held
    if isinstance(held, dict):
        items = {key: _whole(item) for key, item in held.items()}
        if not _holds(owner, items):  # write only if changed: some dicts refuse writes
            owner.clear()
            owner.update(items)
        return owner
    items = [_whole(item) for item in held]
    if isinstance(owner, list):
        owner[:] = items
    elif isinstance(owner, set) and owner != held:  # a refilled set may have another order
        owner.clear()
        owner.update(items)
    return owner


def _holds(owner: dict, items: dict) -> bool:
    return [*owner] == [*items] and all(owner[key] is item for key, item in items.items())
