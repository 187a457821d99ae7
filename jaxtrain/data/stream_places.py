"""Keep a stream's place after each batch, so that a resumed run continues there instead of reading the stream again.

A dataset returns its place by `state_dict()` and goes back to it by `load_state_dict()`, as for torchdata's
StatefulDataLoader and in Hugging Face's streams. The reader puts the place into the batch, as JSON in bytes.
Needs no jax.
"""

import contextlib
import copy
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxtrain.data import row_keys
from torch_bridge.sources import SequentialSource

KEY = row_keys.PREFIX + "place"
CALLS_KEPT = 64  # more than are ever read ahead
SHARDS = row_keys.PREFIX + "shards"  # key of the shards' places in the place of a stream that is read in shards
TRIED = 16  # samples read again to test whether a place leads back to them


def mark(batch: Any, place: Any) -> None:
    """Store a place in a batch."""
    batch[KEY] = np.frombuffer(json.dumps(place).encode(), np.uint8)


def take_mark(batch: Any) -> Any:
    """Remove the place from a batch and return it; None if it holds none."""
    found = batch.pop(KEY, None)
    return None if found is None else json.loads(np.asarray(found).tobytes())


class Places:
    """The places of one loader's stream, by the step that comes next."""

    def __init__(self, batch_size: int | None):
        self.batch_size = batch_size
        self._known: dict[int, dict[str, Any]] = {}
        self._resumed: dict[str, Any] | None = None

    def remember(self, step: int, epoch: int, batches: int, place: Any) -> None:
        """Keep the stream's place before `step`, which follows so many batches of an epoch."""
        if place is not None:
            kept = list(self._known.items())[1 - CALLS_KEPT :]
            found = {"step": step, "epoch": epoch, "batches": batches, "batch_size": self.batch_size, "place": place}
            self._known = dict([*kept, (step, found)])

    def forget(self, steps: range) -> None:
        """Drop the places before these steps, because no call begins with them."""
        for step in steps:
            self._known.pop(step, None)

    def state(self, step: int) -> dict[str, Any] | None:
        """Return the checkpoint's entry for the place before `step`; None if the stream must be read again."""
        return self._known.get(step)

    def restore(self, state: dict[str, Any] | None) -> None:
        """Take the entry of a checkpoint."""
        self._resumed = state

    def before(self, step: int) -> dict[str, Any] | None:
        """Return the checkpoint's place for `step`, once; None if the stream must be read from its epoch's start."""
        found, self._resumed = self._resumed, None
        return found if found and (found["step"], found["batch_size"]) == (step, self.batch_size) else None


class Trial:
    """Tests once whether a stream's places lead back to the same samples.

    A copy of the dataset, made before the pass, reads the second batch again from the place after the first.
    """

    def __init__(self, source: SequentialSource):
        self.source = source  # that the current pass reads
        self._whole = source
        self._copy = copy_of(source) if source.tells_places else None  # now, while no other thread uses it
        self.works: bool | None = None if self._copy else False  # None: not known yet
        self._first: Any = None

    def begin(self, place: Any = None) -> SequentialSource:
        """Return the source to read in a pass: the dataset, or a copy to continue from a place."""
        self.source, self._first = self._whole, None
        if place is not None:  # from a run in which places worked
            self.source, self._copy, self.works = self._copy or copy.deepcopy(self._whole), None, True
        return self.source

    def place_after(self, batch: Any, again: Callable[[SequentialSource, Any], Any]) -> Any:
        """Return the place after `batch`, the one read last; None unless places are known to work.

        again: (source, place) -> the batch read from that place.
        """
        if self.works is False:
            return None
        place = _plain(self.source.place())
        if place is None:
            self.works = False
        elif self.works is None and self._first is not None and self._copy is not None:
            copy, first = self._copy, self._first
            self.works = _leads_to(batch, lambda: again(copy, first))
            self._copy = None
        self._first = place
        return place if self.works else None


def leads_back(part: Callable[[], SequentialSource], seeded: Callable[[], contextlib.AbstractContextManager]) -> bool:
    """Return True if the place after the first TRIED samples leads back to the same next TRIED samples.

    part: returns a new source for the same part of the stream. seeded: a context in which it draws the same numbers.
    """
    try:
        first, again = part(), part()
        if not first.tells_places:
            return False
        with seeded():
            items = _items(first)
            passed = list(itertools.islice(items, TRIED))
            place = _plain(first.place())
            wanted = list(itertools.islice(items, TRIED))
        if place is None or not passed or not wanted:
            return False
        with seeded():
            return _same(wanted, list(itertools.islice(_items(again, place=place), TRIED)))
    except Exception:  # the dataset cannot go back to a place: a resumed run reads it from its start
        return False


def _items(source: SequentialSource, **place: Any) -> Iterator[Any]:
    return itertools.chain.from_iterable(source.chunks(0, 0, 1, 1, lambda epoch: contextlib.nullcontext(), **place))


def plain_place(source: SequentialSource) -> Any:
    """Return a stream's place, None if JSON does not preserve it."""
    return _plain(source.place())


def merged(state: dict[str, Any] | None, shares: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the checkpoint's entry for a stream that several processes divide. shares: `share` of the others."""
    if state is None:
        return None
    shards = dict(state["place"][SHARDS])
    for share in shares:
        shards |= share
    return state | {"place": {SHARDS: shards}}


def share(state: dict[str, Any] | None) -> dict[str, Any]:
    """Return the places of this process's shards, which no other process may know."""
    place = state["place"] if state else None
    return place[SHARDS] if isinstance(place, dict) and SHARDS in place else {}


def copy_of(source: SequentialSource) -> SequentialSource | None:
    """Return a copy of a stream; None if it cannot be copied, as with an open file or a connection."""
    try:
        return copy.deepcopy(source)
    except Exception:
        return None


def _leads_to(batch: Any, read: Callable[[], Any]) -> bool:
    try:
        return _same(batch, read())
    except Exception:  # the dataset cannot go back to a place: a resumed run reads it from its start
        return False


def _plain(place: Any) -> Any:
    """Return the place if JSON preserves it, else None."""
    try:
        return place if place is not None and json.loads(json.dumps(place)) == place else None
    except (TypeError, ValueError):
        return None


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        alike = isinstance(second, dict) and first.keys() == second.keys()
        return alike and all(_same(value, second[key]) for key, value in first.items())
    if isinstance(first, (list, tuple)):
        alike = type(first) is type(second) and len(first) == len(second)
        return alike and all(map(_same, first, second))
    return bool(np.array_equal(np.asarray(first), np.asarray(second)))
