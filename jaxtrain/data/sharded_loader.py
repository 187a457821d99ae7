"""Load a stream that processes and workers divide into shards."""

import copy
from collections.abc import Iterator
from typing import Any, cast

import jax
import numpy as np

from jaxtrain.data import row_keys, sharded_reading, workers
from jaxtrain.data.index_stream import IterableStream
from jaxtrain.data.loader import Loader
from jaxtrain.data.same_stream import refuse_different, same_rows
from jaxtrain.data.sample_reader import SequenceReader


def in_shards(reader: Any) -> SequenceReader:
    """Return a reader of the same stream that answers requests (`Take`) for rows of its shards."""
    other = cast(SequenceReader, copy.copy(reader))
    other.__setstate__(reader.__getstate__() | {"in_shards": True})
    return other


def make_pool(reader: Any, count: int, timeout_s: float, method: str) -> workers.WorkerPool:
    """Return a pool of `count` worker processes, each of which reads its own shards; 0 reads in a thread."""
    reader = in_shards(reader)
    return workers.ProcessPool(reader, count, timeout_s, method) if count else workers.InlinePool(reader)


class ShardedLoader(Loader):
    """A Loader whose stream has a sharding: this process reads the shards that its rows come from."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        inline = isinstance(self.pool, workers.InlinePool) and self.pool.reader is self.reader
        self.reader = in_shards(self.reader)
        self.pool = workers.InlinePool(self.reader) if inline else self.pool

    def host_batch(
        self, step: int, rows: np.ndarray | None = None, together: np.ndarray | None = None
    ) -> dict[str, Any]:
        pool = workers.InlinePool(in_shards(self.reader))
        return self._without_texts(step, next(self._sequence(pool, step, rows))[1])

    def _sequence(self, pool: workers.WorkerPool, first: int, rows: np.ndarray | None = None) -> Iterator[Any]:
        sharding, found = cast(IterableStream, self.stream).sharding, None
        assert sharding is not None
        size = sharding.batch_size
        own, rows = rows is None, self.rows if rows is None else rows
        if pool is self.pool:
            found = self.places.before(first)
            if not self._compared and jax.process_count() > 1:
                refuse_different(self._number, sharded_reading.first_row(pool, sharding))
            self._compared = True
        batches = sharded_reading.read(pool, sharding, rows, first, found and found["place"])
        if pool is self.pool and sharding.shards > 1:
            batches = same_rows(self._number, batches)
        for step, batch, place in batches:
            if self.batch_shapes is not None and own:
                batch = self.batch_shapes.fit(step, batch)
            if pool is self.pool:
                self.places.remember(step + 1, 0, step + 1, place)
            added = row_keys.rows((step * size + rows).astype(np.int32), np.ones(len(rows), bool), batch)
            yield size, added | batch
