"""Keep where a stream stands after each batch, so that a resumed run goes on there instead of reading it again.

A dataset tells its place by `state_dict()` and goes back to it by `load_state_dict()`, as for torchdata's
StatefulDataLoader and in Hugging Face's streams. The reader puts the place into the batch, as the bytes of its JSON.
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
CALLS_KEPT = 64  # more than are read ahead
SHARDS = row_keys.PREFIX + "shards"  # the place of a stream that is read in shards: that of each
TRIED = 16  # samples


def mark(batch: Any, place: Any) -> None:
    """Put a place into a batch."""
    batch[KEY] = np.frombuffer(json.dumps(place).encode(), np.uint8)


def take_mark(batch: Any) -> Any:
    """Take the place out of a batch; None where it holds none."""
    found = batch.pop(KEY, None)
    return None if found is None else json.loads(np.asarray(found).tobytes())


class Places:
    """The places of one loader's stream, by the step that comes next."""

    def __init__(self, batch_size: int | None):
        self.batch_size = batch_size
        self._known: dict[int, dict[str, Any]] = {}
        self._resumed: dict[str, Any] | None = None

    def remember(self, step: int, epoch: int, batches: int, place: Any) -> None:
        """Keep where the stream stands before `step`: after so many batches of an epoch."""
        if place is not None:
            kept = list(self._known.items())[1 - CALLS_KEPT :]
            found = {"step": step, "epoch": epoch, "batches": batches, "batch_size": self.batch_size, "place": place}
            self._known = dict([*kept, (step, found)])

    def forget(self, steps: range) -> None:
        """Drop the places before steps that no call begins with."""
        for step in steps:
            self._known.pop(step, None)

    def state(self, step: int) -> dict[str, Any] | None:
        """Give what a checkpoint keeps of the place before `step`; None where the stream is to be read again."""
        return self._known.get(step)

    def restore(self, state: dict[str, Any] | None) -> None:
        """Take what a checkpoint kept."""
        self._resumed = state

    def before(self, step: int) -> dict[str, Any] | None:
        """Give the place to go on from at `step`, once; None where the stream is read again from its epoch's start."""
        found, self._resumed = self._resumed, None
        return found if found and (found["step"], found["batch_size"]) == (step, self.batch_size) else None


class Trial:
    """Tries once in a process whether a stream's places lead back to the same samples: the second batch of a pass is
    read again from the place after the first, by a copy of the dataset made before the pass."""

    def __init__(self, source: SequentialSource):
        self.source = source  # of the pass
        self._whole = source
        self._copy = copy_of(source) if source.tells_places else None  # now, while no other thread looks at it
        self.works: bool | None = None if self._copy else False  # None: not known yet
        self._first: Any = None

    def begin(self, place: Any = None) -> SequentialSource:
        """Give the source of a pass: the dataset, or a copy that goes on from a place."""
        self.source, self._first = self._whole, None
        if place is not None:  # of a run in which places worked
            self.source, self._copy, self.works = self._copy or copy.deepcopy(self._whole), None, True
        return self.source

    def place_after(self, batch: Any, again: Callable[[SequentialSource, Any], Any]) -> Any:
        """Give the place after the batch that was read last, None where it is not known to work. again: (source, place)
        -> the batch that comes there."""
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
    """Try whether the places of a stream lead back: TRIED samples after the first TRIED are read again from there.

    part: gives the same part of the stream anew. seeded: a context in which it draws the same numbers.
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
    except Exception:  # of a dataset that does not go back: it is read again from its start
        return False


def _items(source: SequentialSource, **place: Any) -> Iterator[Any]:
    return itertools.chain.from_iterable(source.chunks(0, 0, 1, 1, lambda epoch: contextlib.nullcontext(), **place))


def plain_place(source: SequentialSource) -> Any:
    """Return where a stream stands, None where JSON does not hold it."""
    return _plain(source.place())


def merged(state: dict[str, Any] | None, shares: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return what a checkpoint keeps of a stream that several processes divide. shares: `share` of each other one's."""
    if state is None:
        return None
    shards = dict(state["place"][SHARDS])
    for share in shares:
        shards |= share
    return state | {"place": {SHARDS: shards}}


def share(state: dict[str, Any] | None) -> dict[str, Any]:
    """Return the places that this process alone may know."""
    place = state["place"] if state else None
    return place[SHARDS] if isinstance(place, dict) and SHARDS in place else {}


def copy_of(source: SequentialSource) -> SequentialSource | None:
    """Copy a stream; None where it holds what cannot be copied: an open file, a connection."""
    try:
        return copy.deepcopy(source)
    except Exception:
        return None


def _leads_to(batch: Any, read: Callable[[], Any]) -> bool:
    try:
        return _same(batch, read())
    except Exception:  # of a dataset that does not go back: it is read again from its start
        return False


def _plain(place: Any) -> Any:
    """The place, where JSON gives it back as it is; else None."""
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
