"""Wrap torch's Datasets and DataLoaders as sources (torch_bridge.sources) whose items are numpy."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import data

from jaxtrain.errors import UserError
from torch_bridge.datasets.convert import NoArray, in_host_memory, is_dense, kind_of, to_numpy, to_torch, with_arrays
from torch_bridge.datasets.iterable import IterableSource
from torch_bridge.datasets.loader import from_loader
from torch_bridge.datasets.map_style import TorchSource

__all__ = [
    "IterableSource", "NoArray", "TorchSource", "in_host_memory", "is_dense", "kind_of", "source_of", "to_numpy",
    "to_torch", "with_arrays",
]  # fmt: skip


def source_of(dataset: Any) -> Any:
    """Return the source for a map-style or iterable Dataset, a DataLoader, or a tensor (a sample in every row).

    Raises UserError for the iterator of a DataLoader.
    """
    if isinstance(dataset, data.DataLoader):
        return from_loader(dataset)
    if isinstance(dataset, data.IterableDataset):
        return IterableSource(dataset)
    if isinstance(dataset, Iterator):
        raise UserError(
            f"the data are a {type(dataset).__name__}, which gives its batches once; wanted the DataLoader itself, "
            "without iter(...)"
        )
    return TorchSource(data.TensorDataset(dataset) if isinstance(dataset, torch.Tensor) else dataset)
