"""Assemble this process's rows of each batch of a stream in shards from the pieces its workers read. Needs no jax."""

import collections
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxtrain.data import stream_places
from jaxtrain.data.collate import joined, picked
from jaxtrain.data.stream_places import SHARDS
from jaxtrain.data.stream_shards import Sharding, Take
from jaxtrain.data.workers import WorkerPool


def first_row(pool: WorkerPool, sharding: Sharding) -> dict[str, Any]:
    """Return the first row of the first batch, which should be the same on every process."""
    pool.start()
    pool.send(0, Take(sharding, 0, np.array([0]), start=True))
    batch = pool.receive(0)
    stream_places.take_mark(batch)
    return batch


def read(
    pool: WorkerPool, sharding: Sharding, rows: np.ndarray, first: int, place: Mapping[str, Any] | None
) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
    """Yield (step, rows, the place after the step) from step `first` on. place: an earlier such place, to resume from.

    Neighbouring shards go to the same worker, so that each worker reads its share of every batch.
    """
    pool.start()
    lanes = np.sort(sharding.lanes(rows))
    back = np.argsort(np.argsort(sharding.lanes(rows)))  # from sorted lanes to the order of the rows
    own = np.unique(np.concatenate([sharding.shards_of(turn, lanes) for turn in range(sharding.turns)]))
    shares = enumerate(np.array_split(own, pool.workers))
    readers = {shard: worker for worker, share in shares for shard in share.tolist()}
    known = {key: at for key, at in ((place or {}).get(SHARDS, {})).items() if int(key) in readers}
    asked: collections.deque[tuple[int, list[int]]] = collections.deque()
    begun: set[int] = set()

    def ask(step: int) -> None:
        workers = np.array([readers[shard] for shard in sharding.shards_of(step, lanes).tolist()])
        for worker in (those := np.unique(workers).tolist()):
            start = worker not in begun
            places = {key: at for key, at in known.items() if readers[int(key)] == worker} if start else {}
            pool.send(worker, Take(sharding, step, lanes[workers == worker], start, places))
        begun.update(those)
        asked.append((step, those))

    steps = itertools.count(first)
    while True:
        while len(asked) < pool.ahead:
            ask(next(steps))
        step, those = asked.popleft()
        answers = [pool.receive(worker) for worker in those]
        for answer in answers:
            known |= stream_places.take_mark(answer)[SHARDS]
        batch = joined(answers)
        yield step, batch if np.array_equal(back, np.arange(len(back))) else picked(batch, back), {SHARDS: dict(known)}
