"""Results of a captured step as torch's tensors: what the code goes on with, what it has written, gradients."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torch_bridge.capture import artefacts
from torch_bridge.capture.aten_program import Numbers
from torch_bridge.capture.compiled_graph import symbols_of
from torch_bridge.capture.global_rows import operators
from torch_bridge.capture.observed import Observed
from torch_bridge.datasets import to_torch
from torch_bridge.exchange import to_batch
from torch_bridge.lazy_array import to_host as whole
from torch_bridge.lowering.table import Call
from torch_bridge.lowering.wide_integers import stored

__all__ = [
    "Call", "Numbers", "Observed", "add_gradients", "artefacts", "as_tensor", "operators", "overwrite",
    "parameter_among", "stored", "symbols_of", "to_batch", "wants_gradient", "whole",
]  # fmt: skip


def wants_gradient(value: Any, names: Mapping[int, str], trained: set[str]) -> bool:
    """Return True for a parameter that is trained, and for a leaf outside the modules that requires a gradient.

    names: id of a tensor of the modules, or of the optimizer -> its name.
    """
    if not isinstance(value, torch.Tensor) or not (value.requires_grad and value.is_leaf):
        return False
    name = names.get(id(value))
    return name is None or name in trained


def as_tensor(array: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a result as a tensor of its own. Waits for the step."""
    return to_torch(np.array(array)).to(dtype)


def parameter_among(values: Sequence[Any]) -> bool:
    """Return True if a torch parameter is among these."""
    return any(isinstance(value, torch.nn.Parameter) for value in values)


@torch.no_grad()
def add_gradients(tensors: Sequence[torch.Tensor], grads: Sequence[Any]) -> None:
    """Add gradients to those of tensors, as backward() does."""
    for tensor, grad in zip(tensors, grads, strict=True):
        new = as_tensor(grad, tensor.dtype).reshape(tensor.shape).to(tensor.device)
        tensor.grad = new if tensor.grad is None else tensor.grad + new


@torch.no_grad()
def overwrite(tensors: Sequence[torch.Tensor], arrays: Sequence[Any]) -> None:
    """Write new values into tensors, in place."""
    for tensor, array in zip(tensors, arrays, strict=True):
        tensor.copy_(as_tensor(array, tensor.dtype).reshape(tensor.shape))
