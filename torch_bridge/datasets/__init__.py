"""torch's Datasets and DataLoaders as sources: their items come out as numpy, nothing else changes."""

from typing import Any

import torch
from torch.utils import data

from torch_bridge.datasets.convert import to_numpy, to_torch
from torch_bridge.datasets.iterable import IterableSource
from torch_bridge.datasets.loader import from_loader
from torch_bridge.datasets.map_style import TorchSource

__all__ = ["IterableSource", "TorchSource", "as_source", "to_numpy", "to_torch"]


def as_source(dataset: Any) -> Any:
    """A source from a map-style or iterable Dataset, a whole DataLoader, or a tensor (a sample in every row)."""
    if isinstance(dataset, data.DataLoader):
        return from_loader(dataset)
    if isinstance(dataset, data.IterableDataset):
        return IterableSource(dataset)
    return TorchSource(data.TensorDataset(dataset) if isinstance(dataset, torch.Tensor) else dataset)
