"""From positions to batches on the device: read, collate, place, keep a few ready."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jaxtrain.data.collate import collate as default_collate
from jaxtrain.data.index_stream import IndexStream, SampleIndex
from jaxtrain.data.sources import ArraySource, BucketedSource
from jaxtrain.errors import UserError


class Loader:
    """Batches of one split, each a dict of device arrays laid out by `place`.

    rows: which rows of the global batch this process reads. place: the host rows of one or more
    consecutive batches -> global device arrays.
    Host placement reads and collates items; device placement sends positions only, and `gather` fetches the rows
    inside the compiled step from `columns`, which live on every device.
    """

    def __init__(
        self,
        source: Any,
        stream: IndexStream,
        place: Callable[[list[dict]], dict],
        rows: np.ndarray,
        collate: Callable | None = None,
        on_device: bool = False,
        prefetch_batches: int = 2,
        fetch: Callable[[list[int]], list] | None = None,
    ):
        self.source = source
        self.stream = stream
        self.place = place
        self.rows = rows
        self.collate = collate or default_collate
        self.on_device = on_device
        self.prefetch_batches = prefetch_batches
        self.fetch = fetch or (lambda indices: [read_item(source, index) for index in indices])
        self.stall_s = 0.0  # time the consumer waited for data

    def host_batches(self, first: int, count: int) -> list[dict[str, Any]]:
        """The batches of one call of `count` steps, all of one shape."""
        together = np.concatenate([self.stream.batch(first + i)[0] for i in range(count)])
        return [self.host_batch(first + i, together=together) for i in range(count)]

    def host_batch(
        self, step: int, rows: np.ndarray | None = None, together: np.ndarray | None = None
    ) -> dict[str, Any]:
        """This process's rows (or the given ones) of the batch for `step`, in numpy.

        together: positions that share its shape, those of the batch if left out.
        """
        indices, valid = self.stream.batch(step)
        together = indices if together is None else together
        rows = self.rows if rows is None else rows
        indices, valid = indices[rows], valid[rows]
        batch = {"index": indices.astype(np.int32), "valid": valid}
        if self.on_device:
            return batch
        if isinstance(self.source, ArraySource) and (self.source.batched or self.collate is default_collate):
            return batch | self.source[indices]
        epoch = step // self.stream.steps_per_epoch
        items = self.fetch([SampleIndex.of(index, epoch) for index in indices])
        bucketed = isinstance(self.source, BucketedSource)
        collate = self.source.collate_for(together) if bucketed else self.collate
        try:
            return batch | collate(items)
        except UserError as error:
            raise UserError(f"{error} (samples {_shorten(indices)})") from None

    def batches(self, calls: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, dict[str, jax.Array]]]:
        """(first step, count, device batch) for every call in `calls`, read ahead by a thread.

        A call of several steps gets their batches stacked along a new first axis. An error there is raised here.
        """
        calls = list(calls)
        ready: queue.Queue = queue.Queue(self.prefetch_batches)
        closed = threading.Event()

        def put(item) -> bool:
            while not closed.is_set():
                try:
                    ready.put(item, timeout=0.1)
                    return True
                except queue.Full:
                    continue
            return False

        def produce():
            try:
                for first, count in calls:
                    if not put(self.place(self.host_batches(first, count))):
                        return
            except BaseException as error:  # carried over to the consumer, whatever it is
                put(error)

        thread = threading.Thread(target=produce, name="jaxtrain-loader", daemon=True)
        thread.start()
        try:
            for first, count in calls:
                before = time.perf_counter()
                item = ready.get()
                self.stall_s += time.perf_counter() - before
                if isinstance(item, BaseException):
                    raise item
                yield first, count, item
        finally:
            closed.set()
            thread.join()


def read_item(source: Any, index: int) -> Any:
    """source[index]; whatever it raises is reported with the index."""
    try:
        return source[index]
    except Exception as error:
        raise UserError(f"the dataset raised at sample {index}: {type(error).__name__}: {error}") from error


def gather(batch: dict[str, Any], columns: dict[str, Any]) -> dict[str, Any]:
    """The rows `batch["index"]` of every column, beside what the batch already holds. Traced."""
    return {name: column[batch["index"]] for name, column in columns.items()} | batch


def _shorten(indices: np.ndarray) -> str:
    shown = ", ".join(map(str, indices[:4]))
    return shown + (", ..." if len(indices) > 4 else "")
