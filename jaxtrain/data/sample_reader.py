"""Read and collate the items of a batch, with the same code in a thread and in a worker process. Needs no jax.

Every item is read with the global random generators of Python, numpy (and torch) seeded by (seed, epoch, position), so
that augmentation is the same for any number of workers and processes, and after a resume.
"""

import copy
import dataclasses
import functools
import logging
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np

from jaxtrain.data import random_state, stream_places, stream_shards
from jaxtrain.data.buffers import Buffers
from jaxtrain.data.collate import Columns
from jaxtrain.data.collate import collate as default_collate
from jaxtrain.data.index_stream import SampleIndex
from jaxtrain.data.refilled import same
from jaxtrain.data.sources import BucketedSource, ForeignSource, SequentialSource
from jaxtrain.data.widths import TooLarge
from jaxtrain.errors import DataError, UserError
from torch_bridge.sources import RandomState, raised

log = logging.getLogger(__name__)
REFILLED = (
    "the dataset returns the same memory for every sample, filled anew: as in torch, all rows of a batch hold its last "
    "sample; return a copy"
)


@dataclasses.dataclass(frozen=True)
class Request:
    """The rows of a batch to read. together: positions that share its shape (those of all processes). raw: return the
    list of items that the collate function would take."""

    epoch: int
    indices: np.ndarray
    together: np.ndarray
    raw: bool = False


class Reader:
    """Reads the rows of a `Request` and returns them collated, a dict of arrays [row, ...].

    reading: called with each position before it is read, for messages about a reader that hangs or dies.
    """

    def __init__(self, source: Any, collate: Callable[[Sequence[Any]], dict] | None = None, seed: int = 0):
        self.source = source
        self.collate = collate or default_collate
        self.seed = seed
        self.reading: Callable[[int], None] = _no_progress
        self._drawn: set[int] = set()  # numbers of the global generators that items have drawn from
        self._epoch: int | None = None
        self._kept: dict[int, Any] | None = None  # copies of an example's items, by position
        self._refills: bool | None = None  # the dataset fills the same memory for every sample (data.refilled)
        self._from_example = False  # the batch may hold copies of an example's items
        self._buffers = Buffers()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"reading": _no_progress, "_buffers": Buffers()}

    @property
    def draws(self) -> bool:
        """Return True if items have drawn from a global generator."""
        return bool(self._drawn)

    def __call__(
        self, request: Request, example: bool = False, collate: Callable[[Sequence[Any]], dict] | None = None
    ) -> dict[str, Any]:
        """Read a batch as if every generator were seeded before each item.

        Seeding all of them takes 10 us per item, so a generator is not seeded until an item or the collate function has
        drawn from it; that one batch is then read again. example: read the items for an example. The run reuses them
        when it reaches them, so that a dataset that changes when read is read only once. With worker processes, a copy
        of the dataset is read (data.peek). collate: replaces the reader's own, for batches outside the run (`beside`).
        """
        if example and isinstance(self.source, ForeignSource) and self.source.peek is not None:
            return self.source.peek(self, request)
        self._kept = {} if example and isinstance(self.source, ForeignSource) else None
        states = random_state.generators(self.source)
        with random_state.held():
            self._enter(request.epoch)
            before = [state.get() for state in states]
            moved = set(range(len(states)))
            try:
                while moved:
                    items = self._items(request, [states[i] for i in sorted(self._drawn)])
                    batch = self._collate(items, request, collate or self.collate)
                    quiet = [i for i in range(len(states)) if i not in self._drawn]
                    moved = {i for i in quiet if not states[i].same(before[i], states[i].get())}
                    self._drawn |= moved
                if self._kept is not None:
                    self.source.examples = {**self.source.examples, **self._kept}
                return batch
            finally:
                for i in self._drawn:
                    states[i].set(before[i])

    def _enter(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            set_epoch = getattr(self.source, "set_epoch", None)  # torch's protocol for datasets that differ by epoch
            if set_epoch is not None:
                set_epoch(epoch)

    def _items(self, request: Request, seeded: Sequence[RandomState]) -> list[Any] | Columns:
        many = getattr(self.source, "__getitems__", None)  # torch's protocol for several items in one call
        if many is None:
            return self._read_each(request, seeded)
        first = int(request.indices[0])
        self.reading(first)
        try:
            for state in seeded:
                state.seed(int(random_state.mix(self.seed, request.epoch, first)))
            return many(self._positions(request))
        except BaseException as error:
            raise raised(error, f"samples {shorten(request.indices)}") from error

    def _read_each(self, request: Request, states: Sequence[RandomState]) -> list[Any] | Columns:
        """Read the items one by one, seeding `states` before each."""
        source, reading = self.source, self.reading
        indices = self._positions(request)
        plain = self.collate is default_collate and not isinstance(source, BucketedSource) and not request.raw
        at_once = plain and not self._refills
        items: Any = Columns(len(indices), self._buffers.empty, self._refills is None) if at_once else []
        foreign = isinstance(source, ForeignSource)
        read = source.raw if foreign else source.__getitem__
        taken: Any = source.examples if foreign and not request.epoch else {}
        self._from_example = any(index in taken for index in indices)
        seeds = random_state.mix(self.seed, request.epoch, request.indices).tolist() if states else indices
        seeders = [state.seed for state in states]
        given: list[tuple[int, Any]] = []  # an example's items
        for index, seed in zip(indices, seeds, strict=True):
            reading(index)
            try:
                for seed_generator in seeders:
                    seed_generator(seed)
                if self._kept is None:
                    item = taken.pop(index) if index in taken else read(index)
                else:
                    known = self._kept if index in self._kept else taken
                    item = known[index] if index in known else read(index)
                    self._kept[index] = _copied(item)
                    given.append((index, item))
            except BaseException as error:  # SystemExit too: it would end the run as if it were finished
                raise raised(error, f"sample {index}") from error
            try:
                items.append(item)
            except UserError as error:
                raise UserError(f"{error} (sample {index})") from None
        if self._kept and not all(same(self._kept[index], item) for index, item in given):
            self._kept = {}  # the run reads them again, beside their neighbours
            self._note_refills()
        return items if plain or not foreign or request.raw else [source.converted(item) for item in items]

    def _positions(self, request: Request) -> list[int]:
        """Return the positions, as SampleIndex; plain ints for a ForeignSource, which learns epochs by `set_epoch`."""
        indices = request.indices.tolist()
        if isinstance(self.source, ForeignSource):
            return indices
        return [SampleIndex.of(index, request.epoch) for index in indices]

    def _collate(self, items: list[Any] | Columns, request: Request, collate: Callable) -> Any:
        if request.raw:
            return items
        if isinstance(self.source, BucketedSource):
            collate = self.source.collate_for(request.together)
        try:
            return self._batch(items) if isinstance(items, Columns) else collate(items)
        except TooLarge as error:
            raise DataError(f"{error} (sample {request.indices[error.row]})") from None
        except BaseException as error:
            raise raised(error, f"samples {shorten(request.indices)}", "the dataset's collate function") from error

    def _batch(self, items: Columns) -> dict[str, Any]:
        """Return the batch of the items as they are now; note whether they are as they were when they came."""
        batch = items.batch()
        if items.kept is None or len(items.kept) < 2:
            return batch
        now = default_collate(items.kept, self._buffers.empty)
        if not same(batch, now):
            self._note_refills()
        elif not self._from_example:
            self._refills = False
        return now

    def _note_refills(self) -> None:
        self._refills = True
        if multiprocessing.parent_process() is None and not getattr(self.source, "refills", True):
            self.source.refills = True
            log.warning(REFILLED)


@dataclasses.dataclass(frozen=True)
class Next:
    """Request to a worker for the next batch of its share of an epoch. start: begin a pass, from the epoch's start or
    from a place (SequentialSource.place) after `given` batches."""

    epoch: int
    worker: int
    workers: int
    start: bool = False
    given: int = 0
    place: Any = None


FIRST = Next(0, 0, 1, start=True)


@dataclasses.dataclass
class Begun:
    """A pass over a stream whose first chunk has been read."""

    reader: "SequenceReader"
    chunk: Any


class SequenceReader:
    """Reads the batches of a SequentialSource.

    Answers `Next` with the next batch, or None at the end of the epoch's pass. The batch holds the stream's place
    (data.stream_places) if that is known to lead back to the same samples. Answers `Take` (data.stream_shards) with
    some rows of a batch, from the shards that hold them.

    The dataset's random numbers continue from batch to batch, even if other code in this process draws in between.
    whole: the run has several processes, none of which may divide the stream by its rank. in_shards: it answers `Take`.
    """

    def __init__(
        self,
        source: SequentialSource,
        collate: Callable | None,
        batch_size: int,
        seed: int = 0,
        whole: bool = False,
        in_shards: bool = False,
    ):
        self.source, self.collate, self.batch_size, self.seed = source, collate or default_collate, batch_size, seed
        self.whole, self.in_shards = whole, in_shards
        self.reading: Callable[[int], None] = _no_progress
        self._begin()

    draws = True  # assumed; a stream cannot be read again to find out

    def _begin(self) -> None:
        self._random = random_state.Continued(self.source)
        self._chunks: Iterator[Any] = iter(())
        self._given = 0
        self._trial = stream_places.Trial(self.source)
        self._shards: stream_shards.Shards | None = None

    def __getstate__(self) -> dict[str, Any]:
        keys = ("source", "collate", "batch_size", "seed", "whole", "in_shards")
        return {key: self.__dict__[key] for key in keys}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"reading": _no_progress}
        self._begin()

    def __call__(self, request: Next | stream_shards.Take) -> dict[str, Any] | None:
        return self._next(request) if isinstance(request, Next) else self._take(request)

    def _take(self, request: stream_shards.Take) -> dict[str, Any]:
        if request.start or self._shards is None:
            self._shards = stream_shards.Shards(self.source, self.seed, request)
        self.reading(request.step * request.sharding.batch_size + int(request.lanes[0]))
        try:
            return self._shards.batch(request, self.collate)
        except BaseException as error:
            raise raised(error, self._shards.where) from error

    def _next(self, request: Next) -> dict[str, Any] | None:
        begun = self._take_over(request)
        starts = request.start and begun is None
        with self._random.in_force(*((self.seed, request.epoch, request.worker) if starts else ())):
            if starts:
                self._given = request.given
                self._chunks = self._epoch_of(request, self._trial.begin(request.place))
            self.reading(self._given * self.batch_size)
            try:
                chunk = next(self._chunks, None) if begun is None else begun.chunk
                batch = None if chunk is None else self.collate(chunk)
            except TooLarge as error:
                raise DataError(f"{error} (batch {self._given} of epoch {request.epoch}, row {error.row})") from None
            except BaseException as error:
                raise raised(error, f"batch {self._given} of epoch {request.epoch}") from error
            self._given += 1
        if batch is not None and begun is None and not self._random.moved:
            again = lambda source, place: self._again(dataclasses.replace(request, place=place), source)
            place = self._trial.place_after(batch, again)
            if place is not None:
                stream_places.mark(batch, place)
        return batch

    def example(self) -> dict[str, Any] | None:
        """Return the first batch of the first epoch, None if the epoch is empty; the epoch still begins with it."""
        shown = SequenceReader(self.source, beside(self.collate, self.source), self.batch_size, self.seed)
        chunk = self.first_chunk()
        shown._chunks = iter(() if chunk is None else [_copied(chunk)])
        return shown(dataclasses.replace(FIRST, start=False))

    def first_chunk(self) -> Any:
        """Read the first chunk and keep the pass for the first epoch to continue, so that nothing of it is lost.

        If worker processes or shards read the stream, the chunk comes from a copy of it.
        """
        if self.source.peek is not None:
            return self.source.peek.first_chunk(self._as_it_comes(self.source), FIRST)
        if self.source.apart:
            return self._as_it_comes(stream_places.copy_of(self.source) or self.source)(FIRST)
        if self.source.begun is None:
            reader = self._as_it_comes(self.source)
            self.source.begun = Begun(reader, reader(FIRST))
        return self.source.begun.chunk

    def _as_it_comes(self, source: SequentialSource) -> "SequenceReader":
        return SequenceReader(source, _itself, self.batch_size, self.seed, self.whole)

    def _take_over(self, request: Next) -> "Begun | None":
        """Take over the pass that an example began, if this request begins the same pass; else return None."""
        begun = self.source.begun
        if begun is None or request != FIRST or begun.reader.batch_size != self.batch_size:
            return None
        self.source.begun = None
        reader = begun.reader
        self._random, self._chunks, self._trial, self._given = reader._random, reader._chunks, reader._trial, 0
        return begun

    def _epoch_of(self, request: Next, source: SequentialSource) -> Iterator[Any]:
        seeded = functools.partial(random_state.seeded, source, self.seed)
        numbers = request.epoch, request.worker, request.workers, self.batch_size
        return source.chunks(*numbers, seeded, **({} if request.place is None else {"place": request.place}))

    def _again(self, request: Next, source: SequentialSource) -> Any:
        with random_state.seeded(source, self.seed, request.epoch, request.worker):
            chunk = next(self._epoch_of(request, source), None)
            return None if chunk is None else beside(self.collate, source)(chunk)


def beside(collate: Callable, source: Any) -> Callable:
    """Return a copy of a collate function for use outside the run, so that its counters and generators don't change.

    Objects that the dataset holds are shared, not copied. Returns the function itself if it cannot be copied.
    """
    held = getattr(getattr(source, "dataset", None), "__dict__", {}).values()
    try:
        return copy.deepcopy(collate, {id(value): value for value in held})  # memo: deepcopy shares these
    except Exception:
        return collate


def raw_items(reader: Reader | SequenceReader, positions: np.ndarray, converted: bool = True) -> list[Any]:
    """Return uncollated samples: those at `positions`, or a stream's first ones. converted: as the source's collate
    function takes them, not as the dataset returns them."""
    if isinstance(reader, SequenceReader):
        return list(reader.first_chunk() or ())
    items = list(cast(Any, reader(Request(0, positions, positions, raw=True), example=True)))
    return list(map(reader.source.converted, items)) if converted and hasattr(reader.source, "converted") else items


def _itself(chunk: Any) -> Any:
    return chunk


def _copied(value: Any) -> Any:
    """Return a copy, so that a function may change the value; the value itself if it cannot be copied."""
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


def _no_progress(index: int) -> None:
    """Do nothing: the default progress callback."""


def shorten(indices: np.ndarray) -> str:
    shown = ", ".join(map(str, indices[:4]))
    return shown + (", ..." if len(indices) > 4 else "")
