"""Iterable torch Datasets: samples in the order in which they come."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

from jaxtrain.data.sources import SequentialSource
from torch_bridge.datasets.convert import to_numpy
from torch_bridge.datasets.map_style import TorchHooks, set_epoch


class IterableSource(TorchHooks, SequentialSource):
    """An IterableDataset, read by one process: its order would otherwise depend on their number.

    Where it shards itself by `get_worker_info`, pass a DataLoader, whose number of workers is part of the order then.
    """

    def __init__(self, dataset: IterableDataset):
        self.dataset = dataset
        self.size = len(dataset) if hasattr(dataset, "__len__") else None

    def batches(
        self, epoch: int, worker: int, workers: int, batch_size: int, collate: Callable
    ) -> Iterator[dict[str, Any]]:
        set_epoch(self.dataset, epoch)
        items = iter(self.dataset)
        while chunk := list(itertools.islice(items, batch_size)):
            yield collate([to_numpy(item) for item in chunk])
