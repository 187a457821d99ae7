"""Buffers and parameters that a forward pass assigns anew: `self.mean = 0.9 * self.mean + x.mean(0)`."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree


def of(module: torch.nn.Module) -> list[tuple[torch.nn.Module, str, str, torch.Tensor | None]]:
    """Return every registered buffer as (module, the module's path, the buffer's name, tensor)."""
    parts = ((path.removeprefix("wrapped_module").removeprefix("."), part) for path, part in module.named_modules())
    return [(part, path, name, buffer) for path, part in parts for name, buffer in part._buffers.items()]


def write(before: list, outputs: Any, misfits: list[str]) -> Any:
    """Write the buffers that a call has replaced (`self.mean = 0.9 * self.mean + ...`) in place, after the call.

    torch.export does so for the outermost module only, and drops buffers that inner modules assign. If any were
    replaced, outputs are returned as copies: they may share memory with the old buffers. before: the result of `of`.
    misfits: receives a sentence for each buffer that cannot be kept.
    """
    replaced = [item for item in before if item[0]._buffers.get(item[2]) is not item[3]]
    if not replaced:
        return outputs
    outputs = pytree.tree_map_only(torch.Tensor, torch.clone, outputs)
    news = [part._buffers.get(name) for part, _, name, _ in replaced]
    for (part, path, name, old), new in zip(
        replaced, [x if x is None else x.detach().clone() for x in news], strict=True
    ):
        if old is None or new is None or new.shape != old.shape or new.dtype != old.dtype:
            full = f"{path}.{name}".removeprefix(".")
            misfits.append(f"a call makes buffer {full} {_kind(new)}, it was {_kind(old)}")
        else:
            old.copy_(new)
        part._buffers[name] = old
    return outputs


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


def _kind(x: torch.Tensor | None) -> str:
    return "None" if x is None else f"{x.dtype} of shape {tuple(x.shape)}"


@contextlib.contextmanager
def kept(module: torch.nn.Module) -> Iterator[None]:
    """Restore every buffer at the end: torch.export assigns tensors of its own while it records."""
    before = [(part._buffers, dict(part._buffers)) for part in module.modules()]
    try:
        yield
    finally:
        for owner, held in before:
            owner.clear()
            owner.update(held)
