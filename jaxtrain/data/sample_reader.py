"""From positions to the items of a batch, collated: the same code in a thread and in a worker process. Needs no jax.

Every item is read with Python's, numpy's (and torch's) global random generators seeded by (seed, epoch, position), so
that augmentation is the same for any number of workers and processes, and after a resume.
"""

import ctypes
import dataclasses
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from jaxtrain.data.buffers import Buffers
from jaxtrain.data.collate import Columns, TooLarge
from jaxtrain.data.collate import collate as default_collate
from jaxtrain.data.index_stream import SampleIndex
from jaxtrain.data.sources import BucketedSource, ForeignSource, SequentialSource
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
    """Python's global generator. Its state as a tuple takes 9 us to get and 5 to compare, so a copy of the words in its
    object is kept beside the tuple, and a new tuple is made when they changed."""

    def __init__(self):
        self._kept: Any = None
        self._state: Any = None
        self._generator = random.getstate.__self__
        words = np.array(random.getstate()[1][:-1], np.uint32).tobytes()
        self._found = words in _contents(self._generator)  # as in CPython

    def get(self) -> Any:
        now = (_contents(self._generator), self._generator.gauss_next) if self._found else None
        if now is None or now != self._kept:
            self._kept, self._state = now, random.getstate()
        return self._state

    set = staticmethod(random.setstate)
    seed = staticmethod(random.seed)

    @staticmethod
    def same(first, second) -> bool:
        return first is second or first == second


class NumpyRandom:
    """numpy's global generator. Copying its state out is slow (24 us), so that is done only when its bytes changed."""

    def __init__(self):
        self._bytes: bytes | None = None
        self._state: Any = None

    def get(self) -> Any:
        now = self._now()
        if now is None or now != self._bytes:
            self._bytes, self._state = now, np.random.get_state()
        return self._state

    set = staticmethod(np.random.set_state)

    @staticmethod
    def seed(seed: int) -> None:
        np.random.seed(seed & 0xFFFFFFFF)

    @staticmethod
    def same(first, second) -> bool:
        return first is second or (first[2:] == second[2:] and np.array_equal(first[1], second[1]))

    @staticmethod
    def _now() -> bytes | None:
        generator = np.random.get_bit_generator()
        if not isinstance(generator, np.random.MT19937):
            return None
        words = ctypes.string_at(generator.ctypes.state_address, 2500)  # 624 and a position
        return words + _contents(np.random.get_state.__self__)  # which holds a normal number in stock


def _contents(generator: Any) -> bytes:
    """The bytes of a C object, without its count of references."""
    return ctypes.string_at(id(generator), generator.__sizeof__())[object.__basicsize__ :]


class Reader:
    """Requests -> collated batches, dicts of arrays [row, ...].

    reading: the position that is being read, for messages about a reader that hangs or dies.
    """

    def __init__(self, source: Any, collate: Callable[[Sequence[Any]], dict] | None = None, seed: int = 0):
        self.source = source
        self.collate = collate or default_collate
        self.seed = seed
        self.reading: Callable[[int], None] = _nobody_asks
        self._drawn: set[int] = set()  # which of the global generators items were seen to draw from
        self._epoch: int | None = None
        self._buffers = Buffers()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"reading": _nobody_asks, "_buffers": Buffers()}

    def __call__(self, request: Request) -> dict[str, Any]:
        """Seeding before every item costs more than reading a small one, so a generator is left alone until an item,
        or the collate function, draws from it; that batch is then read again."""
        self._enter(request.epoch)
        states = random_states(self.source)
        before = [state.get() for state in states]
        moved = set(range(len(states)))
        try:
            while moved:
                items = self._items(request, [states[i] for i in sorted(self._drawn)])
                batch = self._collate(items, request)
                quiet = [i for i in range(len(states)) if i not in self._drawn]
                moved = {i for i in quiet if not states[i].same(before[i], states[i].get())}
                self._drawn |= moved
            return batch
        finally:
            for i in self._drawn:
                states[i].set(before[i])

    def _enter(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            set_epoch = getattr(self.source, "set_epoch", None)  # torch's protocol: datasets that change by epoch
            if set_epoch is not None:
                set_epoch(epoch)

    def _items(self, request: Request, seeded: Sequence[RandomState]) -> list[Any] | Columns:
        many = getattr(self.source, "__getitems__", None)  # torch's protocol: several items in one go
        if many is None or seeded:
            return self._read_each(request, seeded)
        self.reading(int(request.indices[0]))
        try:
            return list(many(self._positions(request)))
        except BaseException as error:
            raise _raised(error, f"samples {shorten(request.indices)}") from error

    def _read_each(self, request: Request, states: Sequence[RandomState]) -> list[Any] | Columns:
        """One after another; `states` are seeded anew before each."""
        source, reading = self.source, self.reading
        indices = self._positions(request)
        plain = self.collate is default_collate and not isinstance(source, BucketedSource)
        items: list[Any] | Columns = Columns(len(indices), self._buffers.empty) if plain else []
        read = source.raw if plain and isinstance(source, ForeignSource) else source.__getitem__
        seeds = mix(self.seed, request.epoch, request.indices).tolist() if states else indices
        seeders = [state.seed for state in states]
        for index, seed in zip(indices, seeds, strict=True):
            reading(index)
            try:
                for seed_generator in seeders:
                    seed_generator(seed)
                item = read(index)
            except BaseException as error:  # a SystemExit would end the run as if it were done
                raise _raised(error, f"sample {index}") from error
            try:
                items.append(item)
            except UserError as error:
                raise UserError(f"{error} (sample {index})") from None
        return items

    def _positions(self, request: Request) -> list[int]:
        """A dataset of another world gets plain integers: it hears of epochs by `set_epoch`."""
        indices = request.indices.tolist()
        if isinstance(self.source, ForeignSource):
            return indices
        return [SampleIndex.of(index, request.epoch) for index in indices]

    def _collate(self, items: list[Any] | Columns, request: Request) -> dict[str, Any]:
        bucketed = isinstance(self.source, BucketedSource)
        collate = self.source.collate_for(request.together) if bucketed else self.collate
        try:
            return items.batch() if isinstance(items, Columns) else collate(items)
        except TooLarge as error:
            raise DataError(f"{error} (sample {request.indices[error.row]})") from None
        except UserError as error:
            raise UserError(f"{error} (samples {shorten(request.indices)})") from None
        except BaseException as error:
            raise _raised(error, f"samples {shorten(request.indices)}", "the dataset's collate function") from error


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
            for state in random_states(self.source):
                state.seed(int(mix(self.seed, request.epoch, request.worker)))
            self._batches = self.source.batches(request.epoch, *share, self.batch_size, self.collate)
        self.reading(self._given * self.batch_size)
        try:
            batch = next(self._batches, None)
        except TooLarge as error:
            raise DataError(f"{error} (batch {self._given} of epoch {request.epoch}, row {error.row})") from None
        except UserError:
            raise
        except BaseException as error:
            raise _raised(error, f"batch {self._given} of epoch {request.epoch}") from error
        self._given += 1
        return batch


def random_states(source: Any) -> list[RandomState]:
    """The global generators that a source's items may draw from."""
    own = source.random_states() if isinstance(source, ForeignSource) else []
    return [_PYTHON, _NUMPY, *own]


_PYTHON, _NUMPY = PythonRandom(), NumpyRandom()


def _nobody_asks(index: int) -> None:
    """Nobody wants to know which sample is being read."""


def mix(*numbers: int | np.ndarray) -> np.ndarray:
    """63-bit numbers that depend on each of `numbers`, which broadcast. Source: Steele et al. 2014, SplitMix64."""
    value: Any = 0
    for number in numbers:  # plain integers as long as it can be: numpy takes ten times as long for one
        number = number.astype(np.uint64) if isinstance(number, np.ndarray) else int(number)
        value = (value + number + 0x9E3779B97F4A7C15) & _WORD
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
        value = value ^ (value >> 31)
    return np.asarray(value, np.uint64) >> np.uint64(1)


_WORD = 2**64 - 1


def _raised(error: BaseException, where: str, what: str = "the dataset") -> BaseException:
    """What to raise instead: the error in words. A Ctrl-C of the user's stays one."""
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if isinstance(error, KeyboardInterrupt) and handled and threading.current_thread() is threading.main_thread():
        return error
    return DataError(f"{what} raised at {where}: {type(error).__name__}: {error}")


def shorten(indices: np.ndarray) -> str:
    shown = ", ".join(map(str, indices[:4]))
    return shown + (", ..." if len(indices) > 4 else "")
