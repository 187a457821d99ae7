"""Sources for DataLoaders, which keep the loader's sampler, batch_sampler, collate_fn, generator and worker_init_fn.

The loader is not iterated. Its sampler chooses the samples and jaxtrain's own workers read them, so that a run can
resume in the middle of an epoch without reading the samples before it, on any number of processes.
"""

import itertools
import numbers
from collections.abc import Callable, Hashable, Iterator
from typing import Any, cast

import torch
from torch.utils import data
from torch.utils.data import _utils

from jaxtrain.errors import UserError
from torch_bridge.datasets.convert import to_numpy
from torch_bridge.datasets.iterable import IterableSource
from torch_bridge.datasets.lengths import length_of, promised_length
from torch_bridge.datasets.map_style import TorchHooks, check_length, set_epoch, without_length
from torch_bridge.datasets.own_generators import generators_in
from torch_bridge.datasets.sampler_order import SamplerOrder
from torch_bridge.sources import BatchOrder, OrderedSource, Seeded, SequentialSource

ENDLESS = 20  # a sampler that yields this many times the dataset's length counts as endless
KEYS = 2**30  # keys that are not positions are numbered from here on
SAME_BATCHES = ("torch", "torchdata", "accelerate")  # packages whose loaders yield the batches of torch's
DEFAULTS = (_utils.collate.default_collate, _utils.collate.default_convert)


def from_loader(loader: data.DataLoader) -> Any:
    """Return the source for a DataLoader. Raises UserError if a subclass builds the batches itself."""
    for method in ("__iter__", "_get_iterator"):
        owner = next(base for base in type(loader).__mro__ if method in vars(base))
        if owner.__module__.partition(".")[0] not in SAME_BATCHES:
            raise UserError(
                f"the data are a DataLoader whose class {owner.__name__} has a {method} of its own: what it changes in "
                "the batches would be lost, as its parts are read here, sampler, Dataset, collate_fn. Do it in one of "
                "those, or write the loop with jaxtrain.compile, which takes any batches"
            )
    if isinstance(loader.dataset, data.IterableDataset) or loader.batch_sampler is None:
        return LoaderSequence(loader)
    return LoaderSource(loader)


class Collated:
    """A user's collate_fn whose tensors are converted to numpy."""

    def __init__(self, function: Callable):
        self.function = function

    def __call__(self, items: list[Any]) -> Any:
        return to_numpy(self.function(items))


class _LoaderHooks(TorchHooks):
    """Reading options of a DataLoader."""

    def __init__(self, loader: data.DataLoader):
        self.dataset = loader.dataset
        self.worker_init_fn = loader.worker_init_fn
        self.workers_wanted = loader.num_workers
        self.persistent = loader.persistent_workers
        context = loader.multiprocessing_context
        self.start_method = context.get_start_method() if loader.num_workers and context is not None else None
        self.collate = None if loader.collate_fn in DEFAULTS else Collated(loader.collate_fn)
        ordering = getattr(loader.sampler, "generator", None)
        self._drawn_from = {id(g) for g in (loader.generator, ordering) if g is not None}
        self._ordered_by = None if ordering is None else id(ordering)
        for place, generator in generators_in(loader.dataset, "dataset").items():
            if id(generator) in self._drawn_from:
                raise UserError(
                    f"{place} is the DataLoader's generator too: in torch the samples' numbers and their order "
                    "come from it by turns, which no reading ahead and no resume repeats; give each its own generator"
                )

    def shares_order(self, other: Any) -> bool:
        return self._ordered_by is not None and self._ordered_by in getattr(other, "_drawn_from", ())


class LoaderSource(_LoaderHooks, OrderedSource):
    """A DataLoader over a map-style Dataset."""

    def __init__(self, loader: data.DataLoader):
        super().__init__(loader)
        self._size = self._length(loader)
        self._keys: list[Any] = []  # keys of the sampler that are not positions
        self._numbers: dict[Any, int] = {}
        sampler, self.batch_size = _global_order(loader)
        self.constant = _is_torchs(sampler)
        by_length = (data.SequentialSampler, data.RandomSampler, data.DistributedSampler)
        self._by_length = self.constant and isinstance(sampler.sampler, by_length)  # torch's default order
        self.replays = not self.constant or loader.generator is not None or _generator_of(sampler) is not None
        self._order = SamplerOrder(loader, sampler)
        own = getattr(sampler, "sampler", None)
        self.draws_at_once = self.constant and not getattr(own, "replacement", False)
        self.draws_at_once |= type(own) is data.WeightedRandomSampler

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_order": None}  # workers receive positions and need no order

    def _length(self, loader: data.DataLoader) -> int:
        """Return the dataset's length or, if it has none, the sampler's: torch needs no other."""
        found = [promised_length(part) for part in (loader.dataset, loader.sampler, loader.batch_sampler)]
        if found == [None] * len(found):
            raise without_length(loader.dataset)
        return next(size for size in found if size is not None)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        return self.converted(self.raw(index))

    def converted(self, item: Any) -> Any:
        return to_numpy(item) if self.collate is None else item

    def raw(self, index: int) -> Any:
        return self.dataset[self._key(index)]

    def __getattr__(self, name: str) -> Any:
        """Provide `__getitems__`, which torch's loader prefers, if the dataset has it."""
        if name == "__getitems__" and hasattr(self.__dict__.get("dataset"), name):
            return self._many
        raise AttributeError(name)

    def _many(self, indices: list[int]) -> Any:
        items = self.dataset.__getitems__([self._key(index) for index in indices])
        return list(items) if self.collate is None else items

    def position(self, key: Any) -> int:
        """Return the integer for what a sampler yields: a position, or a number assigned to any other key of the
        dataset."""
        if isinstance(key, numbers.Integral) or (isinstance(key, torch.Tensor) and not key.is_floating_point()):
            return int(key)
        known = key if isinstance(key, Hashable) else repr(key)
        if known not in self._numbers:
            self._numbers[known] = KEYS + len(self._keys)
            self._keys.append(key)
        return self._numbers[known]

    def _key(self, index: int) -> Any:
        return self._keys[index - KEYS] if index >= KEYS else index

    def set_epoch(self, epoch: int) -> None:
        set_epoch(self.dataset, epoch)
        if self._by_length:
            check_length(self.dataset, self._size, epoch)

    def begin(self) -> "SamplerOrder":
        return self._order.fresh()

    def interleave(self, other: Any, passes: Callable[[int], int]) -> None:
        self._order.interleave(other._order, passes)

    def follow(self, order: BatchOrder | None) -> bool:
        return self._order.follow(() if order is None else (cast(SamplerOrder, order),))


def _is_torchs(batches: Any) -> bool:
    """Return True if the order is made by torch's own samplers, whose only state between epochs is a generator."""
    kinds = (data.SequentialSampler, data.RandomSampler, data.SubsetRandomSampler, data.WeightedRandomSampler)
    return type(batches) is data.BatchSampler and type(batches.sampler) in (*kinds, data.DistributedSampler)


def _generator_of(batches: data.BatchSampler) -> torch.Generator | None:
    return getattr(batches.sampler, "generator", None)


def _global_order(loader: data.DataLoader) -> tuple[Any, int | None]:
    """Return the batches over all processes, and their size if it is fixed.

    A DistributedSampler gives each process its own share. Here every process knows the whole order and takes its rows
    of it: the global batches hold the same samples, without the repeated ones that make torch's shares equal.
    """
    batches, sampler = loader.batch_sampler, loader.sampler
    if type(batches) is not data.BatchSampler:
        return batches, None
    if isinstance(sampler, data.DistributedSampler):
        whole = data.DistributedSampler(
            sampler.dataset, 1, 0, shuffle=sampler.shuffle, seed=sampler.seed, drop_last=sampler.drop_last
        )
        size = batches.batch_size * sampler.num_replicas
        return data.BatchSampler(whole, size, batches.drop_last), size
    return batches, batches.batch_size


class LoaderSequence(_LoaderHooks, SequentialSource):
    """A DataLoader over an IterableDataset, or one whose items are already batches (batch_size=None)."""

    def __init__(self, loader: data.DataLoader):
        super().__init__(loader)
        self.workers = max(1, loader.num_workers)
        self.batch_size, self.drop_last = loader.batch_size, loader.drop_last
        self.ready_made = self.batch_size is None
        mapped = not isinstance(loader.dataset, data.IterableDataset)
        self._fresh = SamplerOrder(loader, loader.sampler) if mapped else None
        self._order, self._next = self._fresh and self._fresh.fresh(), 0
        self._most = ENDLESS * (1 + length_of(loader.dataset)) if mapped else 0
        self.steps = promised_length(loader)
        self.size = None if self.ready_made else promised_length(loader.dataset)

    def steps_per_epoch(self, batch_size: int) -> int | None:
        """Return the number of batches per epoch. With several workers each share ends in a short batch, which
        `len(loader)` does not count."""
        if self.workers == 1 or self.size is None or self.batch_size is None:
            return self.steps
        shares = (len(range(worker, self.size, self.workers)) for worker in range(self.workers))
        return sum(share // self.batch_size if self.drop_last else -(-share // self.batch_size) for share in shares)

    def chunks(
        self, epoch: int, worker: int, workers: int, batch_size: int, seeded: Seeded, place: Any = None
    ) -> Iterator[Any]:
        set_epoch(self.dataset, epoch)
        if self.ready_made:
            items = iter(self.dataset) if self._order is None else self._in_order(epoch, worker, workers, seeded)
            yield from items if self.collate is not None else map(to_numpy, items)
            return
        items = iter(self.dataset)
        while chunk := list(itertools.islice(items, self.batch_size)):
            if len(chunk) == self.batch_size or not self.drop_last:
                yield [to_numpy(item) for item in chunk] if self.collate is None else chunk

    def shard(self, count: int, index: int) -> IterableSource:
        if self.ready_made:
            raise UserError(
                "data.stream_shards: a DataLoader with batch_size=None gives ready-made batches, which cannot be put "
                "together from shards; pass its IterableDataset, or a DataLoader with a batch_size"
            )
        part = IterableSource(cast(data.IterableDataset, self.dataset)).shard(count, index)
        part.collate = self.collate
        return part

    def _in_order(self, epoch: int, worker: int, workers: int, seeded: Seeded) -> Iterator[Any]:
        """Yield this worker's share of an epoch. Every worker draws the same order, and first draws all earlier
        epochs."""
        if epoch < self._next:
            self._order, self._next = self._fresh.fresh(), 0
        while self._next <= epoch:
            with seeded(self._next):
                order = list(itertools.islice(self._order.epoch(self._next), self._most))
            if len(order) == self._most:
                raise UserError("the DataLoader's sampler does not end; let it end after an epoch")
            self._next += 1
        return (self.dataset[index] for index in order[worker::workers])
