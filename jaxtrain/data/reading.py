"""From positions to the items of a batch, collated: the same code in a thread and in a worker process. Needs no jax.

Every item is read with Python's, numpy's (and torch's) global random generators seeded by (seed, epoch, position), so
that augmentation is the same for any number of workers and processes, and after a resume.
"""

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from jaxtrain.data.collate import collate as default_collate
from jaxtrain.data.index_stream import SampleIndex
from jaxtrain.data.sources import BucketedSource, HookedSource, SequentialSource
from jaxtrain.errors import DataError, UserError


@dataclasses.dataclass(frozen=True)
class Request:
    """The rows of a batch to read. together: positions that share its shape (those of all processes)."""

    epoch: int
    indices: np.ndarray
    together: np.ndarray


class RandomState(Protocol):
    """A global random generator that datasets draw from."""

    def get(self) -> Any: ...

    def set(self, state: Any) -> None: ...

    def seed(self, seed: int) -> None: ...

    def same(self, first: Any, second: Any) -> bool: ...


class PythonRandom:
    get = staticmethod(random.getstate)
    set = staticmethod(random.setstate)
    seed = staticmethod(random.seed)

    @staticmethod
    def same(first, second) -> bool:
        return first == second


class NumpyRandom:
    get = staticmethod(np.random.get_state)
    set = staticmethod(np.random.set_state)

    @staticmethod
    def seed(seed: int) -> None:
        np.random.seed(seed & 0xFFFFFFFF)

    @staticmethod
    def same(first, second) -> bool:
        return first[2] == second[2] and np.array_equal(first[1], second[1])


class Reader:
    """Requests -> collated batches, dicts of arrays [row, ...].

    reading: the position that is being read, for messages about a reader that hangs or dies.
    """

    def __init__(self, source: Any, collate: Callable[[Sequence[Any]], dict] | None = None, seed: int = 0):
        self.source = source
        self.collate = collate or default_collate
        self.seed = seed
        self.reading: Callable[[int], None] = _nobody_asks
        self._drawn: set[int] = set()  # which of the global generators an item was ever seen to draw from
        self._epoch: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"reading": _nobody_asks}

    def __call__(self, request: Request) -> dict[str, Any]:
        self._enter(request.epoch)
        states = random_states(self.source)
        before = [state.get() for state in states]
        try:
            items = self._items(request, states)
            return self._collate(items, request)
        finally:
            for state, value in zip(states, before, strict=True):
                state.set(value)

    def _enter(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            set_epoch = getattr(self.source, "set_epoch", None)  # torch's protocol: datasets that change by epoch
            if set_epoch is not None:
                set_epoch(epoch)

    def _items(self, request: Request, states: Sequence[RandomState]) -> list[Any]:
        """Seeding before every item costs more than reading a small one, so a generator is left alone until an item
        draws from it; that batch is then read again."""
        while True:
            quiet = {i: state.get() for i, state in enumerate(states) if i not in self._drawn}
            seeded = [states[i] for i in sorted(self._drawn)]
            items = self._read_seeded(request, seeded) if seeded else self._read_all(request)
            moved = {i for i, value in quiet.items() if not states[i].same(value, states[i].get())}
            if not moved:
                return items
            self._drawn |= moved

    def _read_seeded(self, request: Request, states: Sequence[RandomState]) -> list[Any]:
        items = []
        for index in request.indices.tolist():
            _seed(states, self._seed_of(request.epoch, index))
            items.append(self._read(index, request.epoch))
        return items

    def _read_all(self, request: Request) -> list[Any]:
        many = getattr(self.source, "__getitems__", None)  # torch's protocol: several items in one go
        if many is None:
            return [self._read(int(index), request.epoch) for index in request.indices]
        self.reading(int(request.indices[0]))
        try:
            return list(many([SampleIndex.of(int(index), request.epoch) for index in request.indices]))
        except Exception as error:
            raise _raised(error, f"samples {shorten(request.indices)}") from error

    def _read(self, index: int, epoch: int) -> Any:
        self.reading(index)
        try:
            return self.source[SampleIndex.of(index, epoch)]
        except Exception as error:
            raise _raised(error, f"sample {index}") from error

    def _collate(self, items: list[Any], request: Request) -> dict[str, Any]:
        bucketed = isinstance(self.source, BucketedSource)
        collate = self.source.collate_for(request.together) if bucketed else self.collate
        try:
            return collate(items)
        except UserError as error:
            raise UserError(f"{error} (samples {shorten(request.indices)})") from None

    def _seed_of(self, epoch: int, index: int) -> int:
        return mix(self.seed, epoch, index)


@dataclasses.dataclass(frozen=True)
class Next:
    """Asks a worker for the next batch of its share of an epoch."""

    epoch: int
    worker: int
    workers: int


class SequenceReader:
    """`Next` -> the next batch of a SequentialSource; None when the epoch's pass has ended."""

    def __init__(self, source: SequentialSource, collate: Callable | None, batch_size: int, seed: int = 0):
        self.source, self.collate, self.batch_size, self.seed = source, collate or default_collate, batch_size, seed
        self.reading: Callable[[int], None] = _nobody_asks
        self._epoch: int | None = None
        self._batches: Iterator[dict[str, Any]] = iter(())
        self._given = 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"reading": _nobody_asks, "_epoch": None, "_batches": iter(())}

    def __call__(self, request: Next) -> dict[str, Any] | None:
        if request.epoch != self._epoch:
            self._epoch, self._given = request.epoch, 0
            share = (request.worker, request.workers)
            _seed(random_states(self.source), mix(self.seed, request.epoch, request.worker))
            self._batches = self.source.batches(request.epoch, *share, self.batch_size, self.collate)
        self.reading(self._given * self.batch_size)
        try:
            batch = next(self._batches, None)
        except UserError:
            raise
        except Exception as error:
            raise _raised(error, f"batch {self._given} of epoch {request.epoch}") from error
        self._given += 1
        return batch


def random_states(source: Any) -> list[RandomState]:
    """The global generators that a source's items may draw from."""
    own = source.random_states() if isinstance(source, HookedSource) else []
    return [PythonRandom(), NumpyRandom(), *own]


def _nobody_asks(index: int) -> None:
    """Nobody wants to know which sample is being read."""


def mix(*numbers: int) -> int:
    """A 63-bit number that depends on each of `numbers`. Source: Steele et al. 2014, SplitMix64's finaliser."""
    value = 0
    for number in numbers:
        value = (value + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        value ^= value >> 31
    return value >> 1


def _seed(states: Sequence[RandomState], seed: int) -> None:
    for state in states:
        state.seed(seed)


def _raised(error: Exception, where: str) -> DataError:
    return DataError(f"the dataset raised at {where}: {type(error).__name__}: {error}")


def shorten(indices: np.ndarray) -> str:
    shown = ", ".join(map(str, indices[:4]))
    return shown + (", ..." if len(indices) > 4 else "")
