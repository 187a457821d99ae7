"""Read a stream in a fixed number of shards, each by one process or worker, pass after pass.

Every batch takes the same number of samples from each shard; if there are more shards than samples in a batch, it takes
one sample from each of some of them, in turn. The order depends neither on the number of processes nor on that of
workers. A shard that ends restarts at once, independently of the others. Needs no jax.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxtrain.data import random_state, stream_places
from jaxtrain.data.collate import collate as default_collate
from jaxtrain.data.collate import joined, picked, row_shapes
from jaxtrain.errors import UserError
from torch_bridge.sources import SequentialSource

SKIPPED = 256  # samples that are read and dropped at a time


@dataclasses.dataclass(frozen=True)
class Sharding:
    """Maps each row of a batch to the shard that it comes from.

    Each row of a batch has a lane. The lanes of one shard are adjacent, so a process with adjacent lanes has shards of
    its own. buffer: samples of a shard's shuffle buffer. accumulate: number of micro-batches; adjacent lanes are dealt
    out over them, so that a process's rows come from the same shards in each of them.
    """

    shards: int
    batch_size: int
    buffer: int | None = None
    accumulate: int = 1

    def __post_init__(self):
        small, large = sorted((self.shards, self.batch_size))
        if large % small:
            fitting = [n for n in range(1, self.batch_size + 1) if self.batch_size % n == 0]
            fitting += [self.batch_size * n for n in range(2, self.shards // self.batch_size + 2)]
            near = sorted(sorted(fitting, key=lambda n: abs(n - self.shards))[:2])
            raise UserError(
                f"data.stream_shards: {self.shards} neither divides data.batch_size {self.batch_size} nor is a "
                f"multiple of it; nearest are {' and '.join(map(str, near))}"
            )

    @property
    def piece(self) -> int:
        """The number of samples that a batch takes from each of its shards."""
        return max(1, self.batch_size // self.shards)

    @property
    def turns(self) -> int:
        """The number of batches until every shard has been read from once."""
        return max(1, self.shards // self.batch_size)

    def lanes(self, rows: np.ndarray) -> np.ndarray:
        micro = self.batch_size // self.accumulate
        return rows % micro * self.accumulate + rows // micro

    def shards_of(self, step: int, lanes: np.ndarray) -> np.ndarray:
        return lanes // self.piece * self.turns + step % self.turns

    def first_lane(self, shard: int) -> int:
        return shard // self.turns * self.piece

    def taken_before(self, step: int, shard: int) -> int:
        """Return how many samples of a shard the batches before `step` take."""
        return (step + self.turns - 1 - shard % self.turns) // self.turns * self.piece


@dataclasses.dataclass(frozen=True)
class Take:
    """Request to a worker for some lanes of a batch, in ascending order.

    start: begin from `places`, by shard; a shard without a place is read from its beginning, and the samples that
    earlier batches took are dropped.
    """

    sharding: Sharding
    step: int
    lanes: np.ndarray
    start: bool = False
    places: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Shards:
    """The shards that a worker reads. begun: the first request to the worker."""

    def __init__(self, source: SequentialSource, seed: int, begun: Take):
        self.source, self.seed, self.begun = source, seed, begun
        self._open: dict[int, Shard] = {}
        self._reading: Shard | None = None
        self._tells: bool | None = None  # True if the dataset's places lead back; None: not tested yet
        if any(place["state"] is not None for place in begun.places.values()):
            self._tells = True  # tested in the run that kept these places

    def batch(self, request: Take, collate: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Return the requested lanes, collated shard by shard with seeded generators: the same on any process."""
        pieces, places = [], {}
        shards = request.sharding.shards_of(request.step, request.lanes)
        for number in dict.fromkeys(shards.tolist()):
            shard = self._reading = self._shard(number)
            items = shard.take(request.sharding.piece)
            plain = collate is default_collate  # it draws nothing, and seeding takes longer than a small piece
            drawing = random_state.seeded(self.source, self.seed, request.step, number, 1)
            with contextlib.nullcontext() if plain else drawing:
                piece = collate(items)
            own = request.lanes[shards == number] - request.sharding.first_lane(number)
            pieces.append(self._own(piece, own, len(items)))
            places[str(number)] = shard.place()
        self._check(pieces, request.step)
        batch = dict(joined(pieces))
        stream_places.mark(batch, {stream_places.SHARDS: places})
        return batch

    @property
    def where(self) -> str:
        """Describe the sample that is being read, for messages."""
        return "the first sample" if self._reading is None else self._reading.described

    def _own(self, piece: dict[str, Any], own: np.ndarray, count: int) -> dict[str, Any]:
        wrong = {name: rows for name, (rows, _, _) in row_shapes(piece).items() if rows != count}
        if wrong:
            name, rows = next(iter(wrong.items()))
            raise UserError(
                f"data.stream_shards: the collate function gives {rows} rows of `{name}` for {count} samples, wanted "
                "as many; a stream in shards is collated shard by shard"
            )
        return piece if len(own) == count else picked(piece, own)

    def _check(self, pieces: list[dict[str, Any]], step: int) -> None:
        first = shapes_of_rows(pieces[0])
        for piece in pieces[1:]:
            if shapes_of_rows(piece) != first:
                raise differing(step, first, shapes_of_rows(piece))

    def _shard(self, number: int) -> "Shard":
        if number not in self._open:
            sharding = self.begun.sharding
            part = lambda: self.source.shard(sharding.shards, number)
            if self._tells is None:
                seeded = lambda: random_state.seeded(self.source, self.seed, 0, number)
                self._tells = stream_places.leads_back(part, seeded)
            place = self.begun.places.get(str(number))
            shard = self._open[number] = Shard(part(), number, sharding, self.seed, self._tells, place)
            if place is None:
                self._reading = shard
                shard.skip(sharding.taken_before(self.begun.step, number))
        return self._open[number]


class Shard:
    """Reads one shard, pass after pass, through its shuffle buffer.

    A pass is read in blocks of `sharding.buffer` samples; each block is yielded in a shuffled order while the next one
    is read. tells: the source's places lead back to the same samples. place: where to continue, as returned by `place`.
    """

    def __init__(
        self,
        source: SequentialSource,
        number: int,
        sharding: Sharding,
        seed: int,
        tells: bool = False,
        place: Mapping[str, Any] | None = None,
    ):
        self.source, self.number, self.sharding, self.seed, self.tells = source, number, sharding, seed, tells
        self._random = random_state.Continued(source)
        self._begin(place or {"pass": 0, "taken": 0, "block": 0, "used": 0, "state": None})

    def _begin(self, at: Mapping[str, Any]) -> None:
        """Begin reading at a place.

        at: number of the pass; samples of the pass before the current block (taken); number of the block; samples of
        the block already yielded (used); the dataset's own state before the block, None to read the pass from 0 on.
        """
        self._at = dict(at)
        self._seeds: tuple[int, ...] = (self.seed, at["pass"], self.number)  # used for the first sample only
        self._given = at["taken"] + at["used"]
        self._items = self._unbuffered() if self.sharding.buffer is None else self._shuffled()

    def take(self, count: int) -> list[Any]:
        """Return the next `count` samples. Raises UserError if a pass has none."""
        items: list[Any] = []
        while True:
            with self._random.in_force(*self._seeds):
                self._seeds = ()
                found = list(itertools.islice(self._items, count - len(items)))
            items += found
            self._given += len(found)
            if len(items) == count:
                return items
            if not self._given:
                raise UserError(
                    f"shard {self.number} of {self.sharding.shards} (data.stream_shards) has no sample in its pass "
                    f"{self._at['pass']}; every shard needs one, so take fewer shards"
                )
            self._begin({"pass": self._at["pass"] + 1, "taken": 0, "block": 0, "used": 0, "state": None})

    def skip(self, count: int) -> None:
        """Read and drop so many samples."""
        for first in range(0, count, SKIPPED):
            self.take(min(SKIPPED, count - first))

    def place(self) -> dict[str, Any]:
        """Return the shard's place, in values that JSON can hold."""
        if self.sharding.buffer is None:
            return self._at | {"state": self._state()}
        return self._at | ({"state": None} if self._random.moved else {})

    @property
    def described(self) -> str:
        return f"sample {self._given} of shard {self.number} in pass {self._at['pass']}"

    def _read(self) -> Iterator[Any]:
        """Return an iterator over the samples of the pass from the current block on."""
        seeded = lambda epoch: random_state.seeded(self.source, self.seed, epoch, self.number)
        state = self._at["state"]
        place = {} if state is None else {"place": state}
        items = itertools.chain.from_iterable(self.source.chunks(self._at["pass"], 0, 1, 1, seeded, **place))
        passed = self._at["taken"] if state is None else 0
        return itertools.islice(items, passed, None)

    def _unbuffered(self) -> Iterator[Any]:
        for item in self._read():
            self._at["taken"] += 1
            yield item

    def _shuffled(self) -> Iterator[Any]:
        items = self._read()
        block = list(itertools.islice(items, self.sharding.buffer))
        done = self._at["used"]
        while block:
            key = [int(random_state.mix(self.seed, self._at["pass"], self.number)), self._at["block"]]
            order = np.random.Generator(np.random.Philox(key=key)).permutation(len(block))
            following: list[Any] = []
            after = {"state": self._state(), "taken": self._at["taken"] + len(block), "block": self._at["block"] + 1}
            for used, index in enumerate(order, start=1):
                self._at["used"] = used
                if used > done:
                    yield block[index]
                following += itertools.islice(items, 1)
            self._at |= after | {"used": 0}
            block, done = following, 0

    def _state(self) -> Any:
        """Return the dataset's own state; None if it doesn't lead back. It lacks the generators, if any has drawn."""
        return stream_places.plain_place(self.source) if self.tells and not self._random.moved else None


def shapes_of_rows(batch: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the shape of a row and the dtype of every array of a batch, without the loader's own entries."""
    return {name: shape[1:] for name, shape in row_shapes(batch).items() if name != stream_places.KEY}


def differing(step: int, first: Mapping[str, Any], second: Mapping[str, Any]) -> UserError:
    """Return the error for rows of two different shapes."""
    name = next(name for name in {**first, **second} if first.get(name) != second.get(name))
    said = lambda shapes: f"shape {list(shapes[name][0])} ({shapes[name][1]})" if name in shapes else "none"
    return UserError(
        f"data.stream_shards: the rows of `{name}` have {said(first)}, and in batch {step} others have {said(second)}; "
        "a stream in shards needs rows of one shape: pad every sample to the same length in the Dataset or its collate "
        "function (padding='max_length'), or leave data.stream_shards out"
    )
