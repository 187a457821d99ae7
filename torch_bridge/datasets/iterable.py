"""Iterable torch Datasets: samples in the order in which they come."""

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from torch_bridge.datasets.convert import to_numpy
from torch_bridge.datasets.map_style import TorchHooks, set_epoch
from torch_bridge.sources import Seeded, SequentialSource


class IterableSource(TorchHooks, SequentialSource):
    """An IterableDataset, read by one process: its order would otherwise depend on their number.

    Where it shards itself by `get_worker_info`, pass a DataLoader, whose number of workers is part of the order then.
    """

    def __init__(self, dataset: IterableDataset):
        self.dataset = dataset
        self.size = promised_length(dataset)
        self.tells_places = all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))

    def place(self) -> Any:
        return self.dataset.state_dict()

    def chunks(
        self, epoch: int, worker: int, workers: int, batch_size: int, seeded: Seeded, place: Any = None
    ) -> Iterator[Any]:
        set_epoch(self.dataset, epoch)
        if place is not None:
            self.dataset.load_state_dict(place)
        items = iter(self.dataset)
        while chunk := list(itertools.islice(items, batch_size)):
            yield [to_numpy(item) for item in chunk]


def promised_length(stream: Any) -> int | None:
    """Return `len(stream)`, or None where it has none or raises: a stream of unknown length often inherits one."""
    try:
        return len(stream)
    except (TypeError, NotImplementedError, AttributeError):
        return None
