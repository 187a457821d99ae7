"""Tensors in double precision, which a run holds in single precision."""

import logging
from collections.abc import Iterable, Mapping

import numpy as np
import torch

from torch_bridge.datasets import to_numpy
from torch_bridge.lazy_array import own_array

log = logging.getLogger(__name__)
_DOUBLE = (torch.float64, torch.complex128)


def doubles_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Return copies of the values of those that are float64 or complex128."""
    return {key: own_array(to_numpy(tensor)) for key, tensor in tensors.items() if tensor.dtype in _DOUBLE}


def holds(place: torch.Tensor, value: torch.Tensor) -> bool:
    """Return True if a double-precision tensor, rounded to the run's single precision, already equals the value."""
    if place.dtype not in _DOUBLE or place.dtype == value.dtype:
        return False
    return torch.allclose(place.to(value), value, rtol=0, atol=0, equal_nan=True)


def tell_changed(owner: str, tensors: Mapping[str, torch.Tensor], changed: Iterable[str]) -> None:
    """Warn of the double-precision tensors among `changed`, the names of buffers that a forward pass writes."""
    rounded = sorted(name for name in changed if name in tensors and tensors[name].dtype in _DOUBLE)
    if rounded:
        log.warning("%s changes float64 buffers, which are computed in float32: %s", owner, ", ".join(rounded))
