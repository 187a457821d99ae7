"""Iterable torch Datasets, read in the order in which they yield their samples."""

import copy
import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from jaxtrain.errors import UserError
from torch_bridge.datasets.convert import to_numpy
from torch_bridge.datasets.lengths import promised_length
from torch_bridge.datasets.map_style import TorchHooks, set_epoch
from torch_bridge.sources import Seeded, SequentialSource, divided


class IterableSource(TorchHooks, SequentialSource):
    """An IterableDataset, read by one process: with several, the order would depend on their number.

    If the dataset shards itself by `get_worker_info`, pass a DataLoader: its number of workers then defines the order.
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
            yield [to_numpy(item) for item in chunk] if self.collate is None else chunk

    def shard(self, count: int, index: int) -> "IterableSource":
        if count == 1 and not callable(getattr(self.dataset, "shard", None)):
            return self._whole()
        part = divided(self.dataset, count, index)
        if not isinstance(part, IterableDataset):
            raise UserError(
                f"data.stream_shards: shard({count}, {index}) of {type(self.dataset).__name__} returns "
                f"{type(part).__name__}, wanted an IterableDataset"
            )
        return IterableSource(part)

    def _whole(self) -> "IterableSource":
        """Return a source of the unsharded dataset, copied if possible: testing its `state_dict` support moves its
        position."""
        try:
            return IterableSource(copy.deepcopy(self.dataset))
        except Exception:  # the dataset holds something that cannot be copied: an open file, a connection
            whole = IterableSource(self.dataset)
            whole.tells_places = False
            return whole
