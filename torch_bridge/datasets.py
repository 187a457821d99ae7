"""torch Datasets as sources: tensors become numpy on the way out, nothing else changes."""

from typing import Any

import ml_dtypes
import numpy as np
import torch


def as_source(dataset: Any) -> "TorchSource":
    return TorchSource(dataset)


class TorchSource:
    """A map-style torch Dataset whose items come out as numpy."""

    def __init__(self, dataset: torch.utils.data.Dataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # pyright: ignore[reportArgumentType]

    def __getitem__(self, index: int) -> Any:
        return to_numpy(self.dataset[index])


def to_numpy(value: Any) -> Any:
    """Tensors inside mappings, tuples and lists -> numpy arrays; bfloat16 kept."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if value.dtype == torch.bfloat16:
            return value.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return value.numpy()
    if isinstance(value, dict):
        return {key: to_numpy(inner) for key, inner in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(to_numpy, value))
    if isinstance(value, (tuple, list)):
        return type(value)(map(to_numpy, value))
    return value


def to_torch(array: np.ndarray) -> torch.Tensor:
    """A numpy (or host JAX) array as a tensor of its own; bfloat16 kept."""
    array = np.array(array)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
