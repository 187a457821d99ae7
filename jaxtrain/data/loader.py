"""Turn sample positions into batches on the device: read, collate, place, and prefetch a few."""

import collections
import contextlib
import itertools
import math
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, cast

import jax
import numpy as np

from jaxtrain.data import random_state, row_keys, stream_places, workers
from jaxtrain.data.batch_shapes import BatchShapes
from jaxtrain.data.collate import Named, alike, picked, samples_in, split_texts
from jaxtrain.data.collate import collate as default_collate
from jaxtrain.data.index_stream import FirstBatches, IndexStream, IterableStream, MoreThanPromised, SamplerStream
from jaxtrain.data.same_stream import refuse_different
from jaxtrain.data.sample_reader import Reader, Request, SequenceReader, beside
from jaxtrain.data.sources import ArraySource, ForeignSource, OrderedSource, SequentialSource
from jaxtrain.errors import DataError, UserError

Stream = IndexStream | SamplerStream | FirstBatches | IterableStream
Calls = Iterable[tuple[int, int]]
NAP_S = 0.1
TEXTS_KEPT = 64  # batches; more than are ever read ahead and not yet reported
TOO_LATE = object()
_numbers = itertools.count()  # numbers this process's loaders; a loader has the same number on every process


class ShortBatches(Protocol):
    """Places batches of fewer samples than the stream's batch_size on the devices."""

    def rows(self, size: int) -> np.ndarray:
        """Return the rows of a batch of `size` samples that this process reads."""
        ...

    def place(self, batch: dict, size: int) -> Any:
        """Return this process's rows as global device arrays."""
        ...


class Loader:
    """Batches of one split, each a dict of device arrays laid out by `place`.

    rows: the rows of the global batch that this process reads. place: the host rows of one or more consecutive batches
    -> global device arrays. short: places a batch of fewer samples, which then keeps its true shape and gets a call of
    its own; None: pad it with rows that are not valid. pool: the readers; by default the prefetching thread.
    interrupted: polled while waiting; once it returns True, the batches end. keep_texts: keep strings in the items in
    `texts`, this process's rows by step; otherwise they are an error.
    Host placement reads and collates items; device placement (on_device) sends positions only, and `gather` fetches the
    rows inside the compiled step from `columns`, which live on every device.
    """

    def __init__(
        self,
        source: Any,
        stream: Stream,
        place: Callable[[list[dict]], Any],
        rows: np.ndarray,
        collate: Callable | None = None,
        on_device: bool = False,
        prefetch_batches: int = 2,
        pool: workers.WorkerPool | None = None,
        timeout_s: float = 600.0,
        seed: int = 0,
        interrupted: Callable[[], bool] = lambda: False,
        keep_texts: bool = False,
        short: ShortBatches | None = None,
    ):
        self.source, self.stream, self.place = source, stream, place
        self.interrupted = interrupted
        self.rows, self.short = rows, short
        self.collate = collate or default_collate
        self.on_device = on_device
        self.prefetch_batches = prefetch_batches
        self.timeout_s = timeout_s
        self.reader = make_reader(source, collate, stream.batch_size, seed)
        self.pool = pool or workers.InlinePool(self.reader)
        self._number, self._compared = next(_numbers), False
        self._read_to = 0  # the step after the last batch of a stream
        self.keep_texts = keep_texts
        self.texts: dict[int, dict[str, Any]] = {}  # strings of the last batches, by step
        self.stall_s = 0.0  # time the consumer waited for data
        self.places = stream_places.Places(stream.batch_size)
        self.batch_shapes: BatchShapes | None = None  # pads batches of many lengths to a few sizes
        self.check: Callable[[dict], None] = lambda batch: None  # raises an error for an invalid host batch

    def host_batch(
        self, step: int, rows: np.ndarray | None = None, together: np.ndarray | None = None
    ) -> dict[str, Any]:
        """Read this process's rows (or the given ones) of the batch of `step` at once, in numpy.

        together: the positions that share its shape; by default those of the batch.
        """
        if isinstance(self.stream, IterableStream):
            reader = cast(
                SequenceReader, make_reader(self.source, self.collate, self.stream.batch_size, self.reader.seed)
            )
            example = None if step else reader.example()
            if example is not None:
                return self._without_texts(step, self._take_rows(example, 0, rows)[1])
            batches = filter(None, self._sequence(workers.InlinePool(reader), step, rows))
            return self._without_texts(step, next(batches)[1])
        _, batch, request = self._request(step, rows, together)
        reader = cast(Reader, self.reader)  # of a map-style source
        if request is None:
            return batch
        peeks = isinstance(self.source, ForeignSource) and self.source.peek is not None
        answer = reader(request, example=peeks or not step, collate=beside(reader.collate, self.source))
        return row_keys.join(batch, self._without_texts(step, answer))

    def _without_texts(self, step: int, batch: dict[str, Any]) -> dict[str, Any]:
        arrays, texts = split_texts(batch)
        if texts and not self.keep_texts:
            raise UserError(f"the dataset returns strings for `{next(iter(texts))}`, wanted numbers, arrays or tensors")
        if texts:
            kept = list(self.texts.items())[1 - TEXTS_KEPT :]
            self.texts = dict([*kept, (step, texts)])
        self.check(arrays)
        return arrays

    def batches(self, calls: Calls, more: bool = False) -> Iterator[tuple[int, int, dict[str, jax.Array]]]:
        """Yield (first step, count, device batch) for every call in `calls`, prefetched by a thread.

        A call of several steps gets their batches stacked along a new first axis; if one of them is short and keeps its
        shape, the call is split into single steps. Errors of the thread are raised here. A stream with a single pass
        ends where the pass ends, whatever the calls. more: the run goes on after these calls.
        """
        ready: queue.SimpleQueue = queue.SimpleQueue()  # in C; a queue.Queue is as slow as reading a small sample
        room: queue.SimpleQueue = queue.SimpleQueue()
        closed, consumer = threading.Event(), object()
        if self.batch_shapes is not None:
            self.batch_shapes.begin()
        if isinstance(self.source, ForeignSource) and self.source.peek is not None:
            self.source.peek.forget()
        for _ in range(self.prefetch_batches):
            room.put(None)

        def produce():
            try:
                if isinstance(self.source, ForeignSource):
                    self.source.enter_thread()
                for first, count, batches, size in self._read(calls, more):
                    full = size == self.stream.batch_size
                    batch = self.place(batches) if full else self.short.place(batches[0], size)
                    room.get()
                    if closed.is_set():
                        return
                    ready.put((first, count, batch))
                ready.put(None)
            except BaseException as error:  # passed on to the consumer, whatever it is
                ready.put(error)

        thread = threading.Thread(target=produce, name="jaxtrain-loader", daemon=True)
        thread.start()
        try:
            while (item := self._take(ready)) is not None:
                if isinstance(item, BaseException):
                    raise item
                room.put(None)
                if isinstance(self.pool, workers.InlinePool) and self.pool.reader.draws:
                    random_state.claim(consumer)  # until it asks for the next batch, the consumer owns the generators
                yield item
        finally:
            random_state.drop(consumer)
            closed.set()
            room.put(None)
            with random_state.released():
                thread.join(5)
            if thread.is_alive():
                self.pool.close()
                random_state.abandon()

    def close(self) -> None:
        """End the worker processes; a later iteration starts new ones."""
        self.pool.close()

    def _take(self, ready: queue.SimpleQueue) -> Any:
        """Return the next item. Raises DataError if the reading thread hangs; a ProcessPool watches its own workers."""
        before = time.perf_counter()
        limit = self.timeout_s if isinstance(self.pool, workers.InlinePool) else math.inf
        with contextlib.suppress(queue.Empty):
            return ready.get_nowait()
        with random_state.released():
            item = self._patiently(ready, before + limit)
        if item is TOO_LATE:
            random_state.abandon()
            raise DataError(
                f"the dataset has been at {self.pool.reading()} for more than {limit:g} s (data.timeout_s): does it "
                "wait for something? Raise data.timeout_s if it is only slow"
            )
        self.stall_s += time.perf_counter() - before
        return item

    def _patiently(self, ready: queue.SimpleQueue, deadline: float) -> Any:
        while time.perf_counter() < deadline:
            try:
                return ready.get(timeout=min(NAP_S, max(0.0, deadline - time.perf_counter())))
            except queue.Empty:
                if self.interrupted():
                    return None
        return TOO_LATE

    # --- what is read -------------------------------------------------------------------------------------------

    def _read(self, calls: Calls, more: bool) -> Iterator[tuple[int, int, list[dict], int]]:
        """Yield (first step, count, host batches, samples in each) for every call."""
        calls = iter(calls)
        if isinstance(self.stream, IterableStream):
            begin = next(calls)
            calls, batches = itertools.chain([begin], calls), self._sequence(self.pool, begin[0])
        else:
            calls, ahead = itertools.tee(calls)  # not a list: a run has millions
            batches = self._positions(ahead)
            del ahead
        first, count = 0, 0
        for first, count in calls:
            together = list(itertools.islice(filter(None, batches), count))
            if len(together) < count:
                return
            self.places.forget(range(first + 1, first + count))
            sizes = [size for size, _ in together]
            arrays = [self._without_texts(first + i, batch) for i, (_, batch) in enumerate(together)]
            if set(sizes) == {self.stream.batch_size} and alike(arrays):
                yield first, count, arrays, self.stream.batch_size
            else:
                yield from ((first + i, 1, [arrays[i]], size) for i, size in enumerate(sizes))
        promised = self.stream.steps_per_epoch if isinstance(self.stream, IterableStream) else None
        if promised and (first + count) % promised == 0:
            try:
                next(batches)
            except MoreThanPromised as error:  # the last epoch is trained already; an error would only lose it
                if more:
                    raise
                warnings.warn(f"{error}; the rest of this epoch was not trained on", stacklevel=2)

    def _positions(self, calls: Calls) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the size and the batch of every step, read ahead by the pool; batches of one call share a shape."""

        def asked() -> Iterator[Any]:  # (step, size, batch, request)
            for first, count in calls:
                together = np.concatenate([self.stream.batch(first + i)[0] for i in range(count)])
                yield from ((first + i, *self._request(first + i, None, together)) for i in range(count))

        if self.on_device or self._columnar:
            yield from ((size, batch) for _, size, batch, _ in asked())
            return
        known: collections.deque[tuple[int, int, dict]] = collections.deque()

        def requests() -> Iterator[Request]:
            for step, size, batch, request in asked():
                known.append((step, size, batch))
                yield request

        for answer in workers.round_robin(self.pool, requests()):
            step, size, batch = known.popleft()
            if self.batch_shapes is not None:
                answer = self.batch_shapes.fit(step, answer)
            if self._reads_whole:
                answer = picked(answer, self._rows(size))
            yield size, row_keys.join(batch, answer)

    @property
    def _reads_whole(self) -> bool:
        """Return True if every process must read all rows of a batch, to know its length, and then keep its own."""
        return self.batch_shapes is not None and jax.process_count() > 1

    @property
    def _columnar(self) -> bool:
        """Return True if a batch is a plain slice of the source's arrays."""
        columns = isinstance(self.source, ArraySource)
        return columns and (self.source.batched or self.collate is default_collate)

    def _request(self, step: int, rows: np.ndarray | None, together: np.ndarray | None):
        """Return the size of a batch, its entries that need no reading, and the Request for the rest (None if none)."""
        indices, valid = self.stream.batch(step)
        together = indices if together is None else together
        size = len(valid) if self.short is None else int(valid.sum())
        read = indices[:size] if rows is None and self._reads_whole else None
        rows = self._rows(size) if rows is None else rows
        indices, valid = indices[rows], valid[rows]
        columns = self.source.columns if isinstance(self.source, ArraySource) else {}
        batch = row_keys.rows(indices.astype(np.int32), valid, columns)
        if self.on_device:
            return size, batch, None
        if self._columnar:
            return size, batch | self.source[indices], None
        return size, batch, Request(self.stream.place(step)[0], indices if read is None else read, together)

    def _sequence(self, pool: workers.WorkerPool, first: int, rows: np.ndarray | None = None) -> Iterator[Any]:
        """Yield the size and this process's rows of every batch from step `first` on, and None between two epochs.

        Earlier batches are read and dropped, unless the stream's place at `first` is known.
        """
        stream = self.stream
        epoch, skip = stream.place(first)
        step, given, place = first, 0, None
        found = self.places.before(first) if pool is self.pool else None
        if found is not None and (skip or stream.steps_per_epoch is None):
            epoch, given, place, skip = found["epoch"], found["batches"], found["place"], 0
        elif first != self._read_to and stream.source.replays:
            epoch, skip = 0, first
        while True:
            for batch in workers.iterate_epoch(pool, epoch, given, place):
                place = stream_places.take_mark(batch)
                if not self._compared and pool is self.pool:
                    self._compared = True
                    refuse_different(self._number, batch)
                if given == stream.steps_per_epoch:
                    raise MoreThanPromised(epoch, stream.promise)
                if given >= skip:
                    if self.batch_shapes is not None and rows is None:
                        batch = self.batch_shapes.fit(step, batch)
                    step += 1
                    if pool is self.pool:
                        self._read_to = step
                        self.places.remember(step, epoch, given + 1, place)
                    yield self._take_rows(batch, given * stream.batch_size, rows)
                given += 1
            if stream.once:
                return
            if given < (stream.steps_per_epoch or 1):
                wanted = stream.promise if stream.steps_per_epoch else "at least 1"
                raise UserError(
                    f"the dataset gave {given} batches in epoch {epoch}, wanted {wanted}: "
                    "an IterableDataset must yield in every epoch, and as much as its __len__ says"
                )
            yield None  # the next epoch does not start until its first batch is wanted
            skip = max(0, skip - given)
            epoch, given, place = epoch + 1, 0, None

    def _take_rows(self, batch: dict[str, Any], first: int, rows: np.ndarray | None) -> tuple[int, dict[str, Any]]:
        size = self.stream.batch_size
        count = samples_in(batch)  # the only way to know it for a stream
        if count > size:
            raise UserError(f"a batch of {count} samples came, data.batch_size is {size}: set it to the largest")
        size = size if self.short is None else count
        rows = self._rows(size) if rows is None else rows
        take = np.where(rows < count, rows, 0)
        own = row_keys.rows((first + rows).astype(np.int32), rows < count, batch)
        return size, own | picked(batch, take)

    def _rows(self, size: int) -> np.ndarray:
        return self.rows if size == self.stream.batch_size else self.short.rows(size)


def make_reader(source: Any, collate: Callable | None, batch_size: int, seed: int) -> Reader | SequenceReader:
    """Return the reader for this source. A DataLoader's own collate_fn takes precedence over the task's."""
    if isinstance(source, ForeignSource) and source.collate is not None:
        collate = Named(source.collate)
    elif isinstance(source, SequentialSource) and source.ready_made:
        collate = Named(None)
    if isinstance(source, SequentialSource):
        return SequenceReader(source, collate, batch_size, seed, whole=jax.distributed.is_initialized())
    return Reader(source, collate, seed)


def own_batch_size(source: Any, seed: int = 0, epochs: int = 1, steps: int | None = None, least: int = 1) -> int | None:
    """Return the batch size if the source (a DataLoader) decides it, the largest one if it varies; else None.

    seed, epochs, steps: of the run, since a sampler's batches may depend on them. least: a lower bound for a source of
    ready-made batches, of which only the first is known.
    """
    if isinstance(source, OrderedSource):
        return source.batch_size or SamplerStream(source, None, seed, epochs, steps).batch_size
    if isinstance(source, SequentialSource) and source.ready_made:
        first = cast(SequenceReader, make_reader(source, None, 1, seed)).example()
        return max(least, samples_in(first)) if first else None
    return source.batch_size if isinstance(source, SequentialSource) else None


def make_pool(reader: Reader | SequenceReader, count: int, timeout_s: float, method: str) -> workers.WorkerPool:
    """Return a pool of `count` worker processes, or of as many as a sequential source uses; 0 reads in a thread."""
    if count and isinstance(reader.source, SequentialSource):
        count = reader.source.workers
    return workers.ProcessPool(reader, count, timeout_s, method) if count else workers.InlinePool(reader)


def make_stream(
    source: Any, batch_size: int, seed: int, training: bool, shuffle: bool, drop_last: bool, epochs: int = 1,
    steps: int | None = None,
) -> Stream:  # fmt: skip
    """Return the order of a source's samples: its own if it has one, else a function of (seed, epoch, position).

    epochs, steps: the length of the run.
    """
    if isinstance(source, SequentialSource):
        return IterableStream(source, batch_size, once=not training)
    if isinstance(source, OrderedSource):
        return SamplerStream(source, batch_size, seed, epochs, steps)
    picked = getattr(source, "picked", None)
    if training:
        return IndexStream(len(source), batch_size, seed, shuffle, drop_last, picked)
    return IndexStream(len(source), batch_size, shuffle=False, picked=picked)
