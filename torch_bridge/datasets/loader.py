"""A whole DataLoader: its sampler, batch_sampler, collate_fn, generator and worker_init_fn are kept.

It is taken apart, not iterated: its sampler says which samples, our workers read them, so that a run resumes in the
middle of an epoch without reading what came before, on any number of processes.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import data
from torch.utils.data import _utils

from jaxtrain.data.collate import as_batch
from jaxtrain.data.sample_reader import mix, random_states
from jaxtrain.data.sources import OrderedSource, SequentialSource
from jaxtrain.data.workers import refuse_fork
from jaxtrain.errors import UserError
from torch_bridge.datasets.convert import to_numpy
from torch_bridge.datasets.map_style import TorchHooks, TorchSource, set_epoch

DEFAULTS = (_utils.collate.default_collate, _utils.collate.default_convert)


def from_loader(loader: data.DataLoader) -> Any:
    """The source for a DataLoader. Raises UserError where it asks for a fork that is not safe."""
    context = loader.multiprocessing_context
    if loader.num_workers and context is not None:
        refuse_fork(context.get_start_method())
    if isinstance(loader.dataset, data.IterableDataset) or loader.batch_sampler is None:
        return LoaderSequence(loader)
    return LoaderSource(loader)


class Collated:
    """A collate_fn of the user's: torch in, numpy out under names."""

    def __init__(self, function: Callable):
        self.function = function

    def __call__(self, items: list[Any]) -> dict[str, Any]:
        return as_batch(to_numpy(self.function(items)))


class LoaderSource(TorchHooks, OrderedSource):
    """A DataLoader over a map-style Dataset."""

    def __init__(self, loader: data.DataLoader):
        self.dataset = loader.dataset
        self.worker_init_fn = loader.worker_init_fn
        self.workers_wanted = loader.num_workers
        self.collate = None if loader.collate_fn in DEFAULTS else Collated(loader.collate_fn)
        self.plain = TorchSource(loader.dataset)
        self.sampler, self.batch_size = _global_order(loader)
        self.generator = loader.generator
        self._states: list[torch.Tensor] = [] if self.generator is None else [self.generator.get_state()]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"sampler": None, "generator": None, "_states": []}  # workers are told what to read

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.plain[index] if self.collate is None else self.dataset[index]

    def set_epoch(self, epoch: int) -> None:
        set_epoch(self.dataset, epoch)

    def epoch_batches(self, epoch: int, seed: int) -> list[list[int]]:
        """The sampler's lists. Without a generator of the user's, its draws depend on (seed, epoch) alone; with one,
        epochs follow each other as in torch, and those before a resumed one are drawn again (positions only)."""
        if self.generator is None:
            return self._draw(epoch, seed)
        while len(self._states) <= epoch:
            self._draw_with_generator(len(self._states) - 1, seed)
            self._states.append(self.generator.get_state())
        return self._draw_with_generator(epoch, seed)

    def _draw_with_generator(self, epoch: int, seed: int) -> list[list[int]]:
        self.generator.set_state(self._states[epoch])
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)  # torch draws its workers' seed first
        return self._draw(epoch, seed)

    def _draw(self, epoch: int, seed: int) -> list[list[int]]:
        states = random_states(self)
        before = [state.get() for state in states]
        try:
            for state in states:
                state.seed(int(mix(seed, epoch)))
            for part in (self.sampler, getattr(self.sampler, "sampler", None)):
                set_epoch(part, epoch)
            return [self._positions(batch) for batch in self.sampler]
        finally:
            for state, value in zip(states, before, strict=True):
                state.set(value)

    @staticmethod
    def _positions(batch: Any) -> list[int]:
        try:
            return [int(index) for index in batch]
        except (TypeError, ValueError):
            raise UserError(
                f"the DataLoader's batch_sampler gives {str(batch)[:80]}, wanted a list of positions in the dataset"
            ) from None


def _global_order(loader: data.DataLoader) -> tuple[Any, int]:
    """The batches over all processes, and their largest size.

    A DistributedSampler gives each process its share; here every process knows the whole order and takes its rows of
    it: the same samples in every global batch, without the repeated ones that make its shares even.
    """
    batches, sampler = loader.batch_sampler, loader.sampler
    if isinstance(sampler, data.DistributedSampler) and type(batches) is data.BatchSampler:
        whole = data.DistributedSampler(
            sampler.dataset, 1, 0, shuffle=sampler.shuffle, seed=sampler.seed, drop_last=sampler.drop_last
        )
        size = batches.batch_size * sampler.num_replicas
        return data.BatchSampler(whole, size, batches.drop_last), size
    size = getattr(batches, "batch_size", None)
    if isinstance(size, int):
        return batches, size
    first = list(batches)
    if not first:
        raise UserError("the DataLoader's batch_sampler gives no batch")
    return batches, max(len(batch) for batch in first)


class LoaderSequence(TorchHooks, SequentialSource):
    """A DataLoader over an IterableDataset, or one whose items are batches already (batch_size=None)."""

    def __init__(self, loader: data.DataLoader):
        self.dataset = loader.dataset
        self.worker_init_fn = loader.worker_init_fn
        self.workers, self.workers_wanted = max(1, loader.num_workers), loader.num_workers
        self.batch_size, self.drop_last = loader.batch_size, loader.drop_last
        self.collate = None if loader.collate_fn in DEFAULTS else Collated(loader.collate_fn)
        self.sampler = None if isinstance(loader.dataset, data.IterableDataset) else loader.sampler
        counted = hasattr(loader.dataset, "__len__")
        self.steps = len(loader) if counted else None
        self.size = len(loader.dataset) if counted and self.batch_size is not None else None

    def steps_per_epoch(self, batch_size: int) -> int | None:
        return self.steps

    def batches(
        self, epoch: int, worker: int, workers: int, batch_size: int, collate: Callable
    ) -> Iterator[dict[str, Any]]:
        set_epoch(self.dataset, epoch)
        if self.batch_size is None:
            for item in self._items(epoch, worker, workers):
                yield self.collate(item) if self.collate else as_batch(to_numpy(item))
            return
        items = iter(self.dataset)
        while chunk := list(itertools.islice(items, self.batch_size)):
            if len(chunk) == self.batch_size or not self.drop_last:
                yield self.collate(chunk) if self.collate else collate([to_numpy(item) for item in chunk])

    def _items(self, epoch: int, worker: int, workers: int) -> Iterator[Any]:
        if self.sampler is None:
            return iter(self.dataset)
        set_epoch(self.sampler, epoch)
        state = torch.get_rng_state()
        torch.manual_seed(int(mix(epoch)) & 0x7FFFFFFF)  # every worker draws the same order and takes its share
        order = list(self.sampler)
        torch.set_rng_state(state)
        return (self.dataset[index] for index in order[worker::workers])
