"""Buffers and parameters that a forward pass assigns anew: `self.mean = 0.9 * self.mean + x.mean(0)`."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def of(module: torch.nn.Module) -> list[tuple[torch.nn.Module, str, str, torch.Tensor | None]]:
    """Return every registered buffer as (module, the module's path, the buffer's name, tensor)."""
    parts = ((path.removeprefix("wrapped_module").removeprefix("."), part) for path, part in module.named_modules())
    return [(part, path, name, buffer) for path, part in parts for name, buffer in part._buffers.items()]


def registered(module: torch.nn.Module) -> dict[str, tuple[torch.nn.Module, dict, str, Any]]:
    """Return by name every parameter, buffer and submodule: (owner, the owner's table, key in the table, object)."""
    found = {}
    for path, inner in module.named_modules():
        path = path.removeprefix("wrapped_module").removeprefix(".")
        for table in (inner._parameters, inner._buffers, inner._modules):
            found |= {f"{path}.{key}".removeprefix("."): (inner, table, key, value) for key, value in table.items()}
    return found


def put_back(module: torch.nn.Module, before: dict[str, tuple[torch.nn.Module, dict, str, Any]]) -> list[str]:
    """Undo a call's replacement of parameters and submodules, which an optimizer may hold. Return a sentence for each
    of them, and for each new registration. before: the result of `registered`."""
    now = registered(module)
    sentences = [f"it registers {name}, which did not exist before" for name in sorted(now.keys() - before.keys())]
    for name, (owner, table, key, old) in before.items():
        if table is not owner._buffers and table.get(key) is not old:
            sentences.append(f"it puts another object in the place of {name}")
            table[key] = old
    return sentences


@contextlib.contextmanager
def kept(module: torch.nn.Module) -> Iterator[None]:
    """Restore every buffer at the end: what the code assigns is the result of one call."""
    before = [(part._buffers, dict(part._buffers)) for part in module.modules()]
    try:
        yield
    finally:
        for owner, held in before:
            owner.clear()
            owner.update(held)
