"""What can be trained on: torch Datasets, sequences, arrays."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.data.collate import narrow
from jaxtrain.errors import UserError


class ArraySource:
    """Samples held as columns: a dict of arrays [sample, ...]. Small ones live on the device, gathered in the step.

    batched: rows are stacked as they are, past the task's collate: its columns are what the loss takes.
    """

    def __init__(self, columns: Mapping[str, Any], batched: bool = False):
        self.batched = batched
        self.columns = {name: narrow(np.asarray(column)) for name, column in columns.items()}
        sizes = {name: len(column) for name, column in self.columns.items()}
        if len(set(sizes.values())) > 1:
            raise UserError(f"the columns differ in length: {sizes}; every sample needs each of them")

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index) -> dict[str, np.ndarray]:
        return {name: column[index] for name, column in self.columns.items()}

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self.columns.values())


class BucketedSource:
    """Samples of different sizes that a batch brings to one of a few shapes; a base class for a task's own source.

    batch_shapes: how many different shapes may come, each compiled once. The shape is a function of all positions of
    a global batch, so that every process pads its rows alike; the batches of one call of several steps share it.
    """

    batch_shapes: int = 1

    def collate_for(self, indices: np.ndarray) -> Callable[[Sequence[Any]], dict[str, Any]]:
        """The collate function for a batch of which `indices` are the positions (of all processes)."""
        raise TypeError(f"{type(self).__name__} must define collate_for")


class ForeignSource:
    """A source that comes from another world and keeps its ways there; a base class for torch_bridge.datasets.

    workers_wanted: worker processes that it asks for, where data.num_workers does not.
    random_states: further global generators that its items may draw from (reading.RandomState).
    raw: the sample at a position as the dataset gives it, if `collate` knows its kind (collate.as_array, collate.join).
    enter_worker: called once in every worker process, before the first item.
    enter_thread: called in the thread that reads ahead, where there are no worker processes.
    reducers: type -> function, for values in it that pickle would copy for every worker (as copyreg has them).
    """

    workers_wanted: int = 0

    def raw(self, index: int) -> Any:
        return self[index]

    def random_states(self) -> list:
        return []

    def enter_worker(self, worker: int, workers: int, seed: int) -> None: ...

    def enter_thread(self) -> None: ...

    def reducers(self) -> dict[type, Callable]:
        return {}


class SequentialSource(ForeignSource):
    """Samples that come one after another and cannot be asked for by position; a base class.

    workers: how many processes may share an epoch without changing it. size: samples in an epoch, None if unknown.
    """

    workers: int = 1
    size: int | None = None
    batch_size: int | None = None  # where the source decides

    def batches(
        self, epoch: int, worker: int, workers: int, batch_size: int, collate: Callable
    ) -> Iterator[dict[str, Any]]:
        """This worker's batches of an epoch, each of up to `batch_size` rows."""
        raise TypeError(f"{type(self).__name__} must define batches")

    def steps_per_epoch(self, batch_size: int) -> int | None:
        return None if self.size is None else -(-self.size // batch_size)


class OrderedSource(ForeignSource):
    """A map-style source with an order, a batch size and a collate function of its own; a base class."""

    batch_size: int
    collate: Callable[[Sequence[Any]], dict[str, Any]] | None = None

    def epoch_batches(self, epoch: int, seed: int) -> list[list[int]]:
        """The positions of every batch of an epoch, over all processes."""
        raise TypeError(f"{type(self).__name__} must define epoch_batches")


def describe_size(source: Any) -> str:
    """How many samples a source has, in words."""
    if isinstance(source, SequentialSource):
        return "an unknown number of" if source.size is None else f"{source.size:,}"
    return f"{len(source):,}"


def batch_shapes(source: Any) -> int:
    """How many shapes the batches of a source come in."""
    return source.batch_shapes if isinstance(source, BucketedSource) else 1


def as_source(dataset: Any, name: str = "dataset"):
    """A map-style source from what a user passes: a torch Dataset, a mapping of arrays, any sequence of items."""
    if any(base.__module__.partition(".")[0] == "torch" for base in type(dataset).__mro__):
        from torch_bridge.datasets import as_source as from_torch

        return from_torch(dataset)
    if isinstance(dataset, ForeignSource):
        return dataset
    if isinstance(dataset, Mapping):
        return ArraySource(dataset)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise UserError(
            f"{name} is {type(dataset).__name__}, wanted a torch Dataset, a mapping of arrays, or anything with "
            "__len__ and __getitem__"
        )
    return dataset
