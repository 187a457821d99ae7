"""Load and complete state dicts as the torch module itself does: load hooks, format versions, extra states."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _NormBase

from torch_bridge.datasets import to_torch
from torch_bridge.files.checkpoint import EXTRA_STATE
from torch_bridge.from_torch import state_of
from torch_bridge.lazy_array import as_leaf
from torch_bridge.state_dict import StateDictMismatch, versions, with_versions

# Methods that need no module: torch's default, and that of batch normalisation, which state_dict.py reimplements.
PLAIN = (torch.nn.Module._load_from_state_dict, _NormBase._load_from_state_dict)


def has_own_loading(module: torch.nn.Module) -> bool:
    """Return True if loading a state dict runs code that may change it: hooks, or overridden methods."""
    return any(
        type(part)._load_from_state_dict not in PLAIN
        or type(part).load_state_dict is not torch.nn.Module.load_state_dict
        or bool(part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks)
        for part in module.modules()
    )


def as_loaded(
    module: torch.nn.Module, present: Mapping[str, Any], state: Mapping[str, Any], strict: bool, source: str
) -> tuple[dict[str, np.ndarray], list[str], list[str]]:
    """Load a state dict into the module; return its tensors by path, the missing and the unexpected keys.

    module: is changed, so pass a copy. present: the weights to set before loading. state: tensors, arrays or
    LazyArrays, and extra states. Raises StateDictMismatch if the module refuses it.
    """
    places = dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)))
    with torch.no_grad():
        for key, value in present.items():
            places[key].copy_(_tensor(value))
    tensors = with_versions({key: _tensor(value) for key, value in state.items()}, versions(state))
    try:
        keys = module.load_state_dict(tensors, strict=strict)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise StateDictMismatch(f"cannot load {source}: the module's own load_state_dict says: {reason}") from error
    missing, unexpected = getattr(keys, "missing_keys", []), getattr(keys, "unexpected_keys", [])
    kept = {key: value for key, value in state_of(module).items() if key not in missing}
    return kept, list(missing), list(unexpected)


def complete(module: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Add to a state dict what the module's `state_dict()` has besides tensors: extra states and versions."""
    extra = {
        _key(path): part.get_extra_state()
        for path, part in module.named_modules(remove_duplicate=False)
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state
    }
    formats = {path: {"version": part._version} for path, part in module.named_modules(remove_duplicate=False)}
    return with_versions({**state, **extra}, formats)


def extra_keys(module: torch.nn.Module) -> list[str]:
    """Return the keys of the extra states that the module accepts."""
    return [_key(path) for path, _ in _takers(module)]


def set_extra_states(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Set the extra state of every submodule for which `state` has one."""
    for path, part in _takers(module):
        if _key(path) in state:
            part.set_extra_state(_tensor(state[_key(path)]))


def _tensor(value: Any) -> Any:
    return to_torch(np.asarray(as_leaf(value))) if hasattr(value, "dtype") else value


def _takers(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    plain = torch.nn.Module.set_extra_state
    return [
        (path, part)
        for path, part in module.named_modules(remove_duplicate=False)
        if type(part).set_extra_state is not plain
    ]


def _key(path: str) -> str:
    return f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE
