"""Read example samples for a run with worker processes, without changing the user's dataset.

In torch the main process reads nothing if there are workers. So an example comes from a copy of the dataset, made as
for a worker: changes made by reading (a counter, a file opened on first use) reach neither the workers nor the user.
"""

import copy
import math
from typing import Any

from jaxtrain.data import random_state
from jaxtrain.data.collate import Named
from jaxtrain.data.sources import ForeignSource, SequentialSource
from jaxtrain.data.workers import ProcessPool, freeze
from jaxtrain.errors import DataError, UserError


def read_by(source: Any, workers: int, divided: bool = False) -> None:
    """Tell a source how many worker processes will read it. divided: the source is a stream read in shards."""
    if not isinstance(source, ForeignSource):
        return
    if isinstance(source, SequentialSource):
        source.apart = workers > 0 or divided
        workers = min(workers, source.workers)
    if workers != (source.peek.workers if source.peek else 0):
        source.peek = Peek(workers) if workers else None


class Peek:
    """Answers a reader's requests from a copy of the reader.

    The copy reads in this process, where `get_worker_info` meanwhile answers as in a worker. With a worker_init_fn it
    reads in a process of its own, because that function may change the whole process. A dataset that cannot be copied
    is read directly. workers: the number of worker processes that the copy is told of.
    """

    def __init__(self, workers: int):
        self.workers = workers
        self.forget()

    def __reduce__(self) -> tuple:
        return type(None), ()  # a copy of a source holds none

    def forget(self) -> None:
        """Drop the copy, because the workers begin to read."""
        self._like: Any = None
        self._copy: Any = None
        self._pool: ProcessPool | None = None
        self._refused: UserError | None = None
        self._chunks: dict[int, Any] = {}

    def __call__(self, reader: Any, request: Any) -> Any:
        """Return the reader's answer to the request. Raises DataError if reading fails, UserError if it fails and the
        dataset cannot be sent to worker processes."""
        if self._like is None or not _same(self._like, reader.collate):
            self.forget()
            self._begin(reader)
        if self._pool is not None:
            self._pool.start()
            self._pool.send(0, request)
            return self._pool.receive(0)
        with random_state.held(), self._copy.source.as_worker(self.workers):
            try:
                return self._copy(request)
            except DataError as error:
                raise (self._refused or error) from error.__cause__

    def first_chunk(self, reader: Any, request: Any) -> Any:
        """Return the first chunk of a stream, read only once for each batch size."""
        if reader.batch_size not in self._chunks:
            self._like = None
            chunk = self(reader, request)
            self.forget()
            self._chunks[reader.batch_size] = chunk
        return copy.copy(self._chunks[reader.batch_size])

    def _begin(self, reader: Any) -> None:
        self._like = reader.collate
        source = reader.source
        try:
            if source.worker_init_fn is not None:
                method = "spawn" if source.start_method == "spawn" else "forkserver"
                pool = ProcessPool(reader, 1, math.inf, method, of=self.workers)
                pool.start()
                self._pool = pool
                return
            frozen = freeze(reader)
            self._copy = frozen.ticket().thaw()
            frozen.close()
        except UserError as error:  # raised later: by the workers, unless they are forked, or if reading fails
            self._refused, self._copy = error, _copied(reader)


def _copied(reader: Any) -> Any:
    try:
        return copy.deepcopy(reader)
    except Exception:  # the reader holds a lock, an open file, a connection
        return reader


def _same(first: Any, second: Any) -> bool:
    return first is second or (
        isinstance(first, Named) and isinstance(second, Named) and first.function is second.function
    )
