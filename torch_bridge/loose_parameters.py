"""Parameters that an optimizer updates and none of the given modules has."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from torch_bridge.lowering.errors import CannotRecord
from torch_bridge.lowering.python.inputs import PythonInputs


class LooseParameters(torch.nn.Module):
    """Trained tensors that a loss reads from variables and objects around it: `log_sigma = nn.Parameter(zeros(2))`, a
    criterion with weights. No loss is called with this module."""

    def __init__(self, tensors: Iterable[torch.Tensor]):
        super().__init__()
        same: Any = {str(number): tensor for number, tensor in enumerate(tensors)}
        self._parameters.update(same)  # the objects themselves, which need not be Parameters


def loose_parameters(
    modules: Mapping[str, torch.nn.Module], updates: Iterable[tuple[Callable, Sequence[Any]]]
) -> LooseParameters | None:
    """Return the tensors of optimizers that the modules lack and a loss is seen to read; None if there are none.

    updates: each loss function and its optimizers. A tensor that the loss does not read may belong to another module,
    or to the one that a layer had before.
    """
    known = {id(parameter) for module in modules.values() for parameter in module.parameters()}
    found: dict[int, torch.Tensor] = {}
    for loss_fn, optimizers in updates:
        groups = [group for one in optimizers for group in getattr(one, "param_groups", ())]
        strange = {id(p): p for group in groups for p in group["params"] if id(p) not in known}
        found |= _read(loss_fn, modules, strange) if strange else {}
    return LooseParameters(found.values()) if found else None


def _read(
    loss_fn: Callable, modules: Mapping[str, torch.nn.Module], strange: Mapping[int, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Return those of these tensors that a loss reads, by id; all if it cannot be looked at, because torch runs it."""
    try:
        read = PythonInputs(loss_fn, modules).tensors()
    except CannotRecord:
        return dict(strange)
    return {id(tensor): tensor for tensor in read if id(tensor) in strange}


def given(modules: Mapping[str, torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """Return the modules that the user has given."""
    return {name: module for name, module in modules.items() if not isinstance(module, LooseParameters)}
