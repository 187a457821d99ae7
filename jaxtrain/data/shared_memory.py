"""Batches from a worker process to its parent through shared memory: one copy in, none out.

A segment is a file in memory without a name, handed over by its descriptor, so that nothing is left behind however they
end. The parent's arrays are views; when the last of them is gone, the segment is used again.
"""

import ctypes
import errno
import io
import mmap
import os
import pathlib
import pickle
import tempfile
import types
import weakref
from multiprocessing import reduction
from typing import Any

import numpy as np

ALIGNMENT = 64  # bytes; JAX takes over arrays aligned like this without a copy
SMALLEST = 1 << 20  # bytes of a segment
FUNCTIONS = (type, types.FunctionType)
FOLDER = pathlib.Path("/dev/shm") if pathlib.Path("/dev/shm").is_dir() else pathlib.Path(tempfile.gettempdir())


class Packing(pickle.Pickler):
    """Pickles with the arrays' data left out, also for bfloat16 and its kin, which numpy would put inside.

    table: further types -> how to take them apart, as copyreg has it.
    """

    def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer], table: dict | None = None):
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self.table = table or {}
        self.of_main: list[str] = []  # functions and classes of the main script, which go by their name

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FUNCTIONS) and getattr(value, "__module__", None) == "__main__":
            self.of_main.append(value.__qualname__)
        if isinstance(value, np.ndarray) and value.dtype.kind == "V" and value.dtype.fields is None:
            plain = np.ascontiguousarray(value).view(f"u{value.dtype.itemsize}").reshape(value.shape)
            return _viewed, (plain, value.dtype)
        reduce = self.table.get(type(value))
        return NotImplemented if reduce is None else reduce(value)


def _viewed(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return array.view(dtype)


def pack(value: Any, table: dict | None = None) -> tuple[bytes, list[memoryview]]:
    """The structure of a value, and the data of its arrays."""
    return _pack(value, table)[:2]


def _pack(value: Any, table: dict | None) -> tuple[bytes, list[memoryview], list[str]]:
    """Also the names of what it takes from the main script."""
    file, buffers = io.BytesIO(), []
    packing = Packing(file, buffers, table)
    packing.dump(value)
    return file.getvalue(), [buffer.raw() for buffer in buffers], packing.of_main


def layout(head: bytes, buffers: list[memoryview]) -> tuple[list[tuple[int, int]], int]:
    """(start, end) of the head and of each buffer in a segment, and the bytes it takes."""
    spans, end = [], 0
    for size in (len(head), *(buffer.nbytes for buffer in buffers)):
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + size
        spans.append((start, end))
    return spans, end


class Writer:
    """A worker's side: it makes segments and fills those that the parent has done with."""

    def __init__(self):
        self._segments: dict[int, mmap.mmap] = {}

    def write(self, value: Any, free: int | None) -> tuple[int, int | None, list[tuple[int, int]]]:
        """Number of the segment that holds the value now, its descriptor where it is new, and the spans in it.

        free: a segment to use again, if large enough.
        """
        head, buffers = pack(value)
        spans, size = layout(head, buffers)
        handle = None
        if free is None or len(self._segments[free]) < size:
            if free is not None:
                del self._segments[free]
            free = max(self._segments, default=-1) + 1 if free is None else free
            self._segments[free], handle = _create(size)
        view = memoryview(self._segments[free])
        for (start, end), buffer in zip(spans, (head, *buffers), strict=True):
            view[start:end] = buffer
        return free, handle, spans


def _create(size: int) -> tuple[mmap.mmap, int]:
    """A segment and its descriptor, which the caller closes."""
    size = -(-max(size * 5 // 4, SMALLEST) // mmap.PAGESIZE) * mmap.PAGESIZE
    handle = -1
    try:
        with tempfile.TemporaryFile(prefix="jaxtrain-", dir=FOLDER) as file:  # no name: nothing to remove
            handle = os.dup(file.fileno())
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size)  # full memory is an error here, not a bus error later
        else:
            os.ftruncate(handle, size)
        return mmap.mmap(handle, size), handle
    except OSError as error:
        if handle >= 0:
            os.close(handle)
        if error.errno == errno.EMFILE:
            raise  # the dataset has opened files without closing them
        raise MemoryError(
            f"no room for a batch of {size >> 20} MiB in {FOLDER} ({error}). Give the container more shared memory "
            "(docker run --shm-size=8g), or lower data.num_workers or data.batch_size"
        ) from None


class ReaderSide:
    """The parent's side for one worker."""

    def __init__(self):
        self._segments: dict[int, mmap.mmap] = {}
        self._free: list[int] = []

    def free(self) -> int | None:
        """A segment that no array refers to any more."""
        return self._free.pop() if self._free else None

    def give_back(self, number: int | None) -> None:
        if number is not None:
            self._free.append(number)

    def read(self, number: int, handle: int | None, spans: list[tuple[int, int]]) -> Any:
        """The value; its arrays are views into the segment. handle: the descriptor of a new one; it is closed."""
        if handle is not None:
            self._segments[number] = mmap.mmap(handle, 0)
            os.close(handle)
        segment = self._segments[number]
        lease = (ctypes.c_char * len(segment)).from_buffer(segment)
        weakref.finalize(lease, self._release, number, segment).atexit = False
        view = memoryview(lease).cast("B")
        head, *buffers = (view[start:end] for start, end in spans)
        return pickle.loads(head, buffers=buffers)

    def _release(self, number: int, segment: mmap.mmap) -> None:
        if self._segments.get(number) is segment:
            self._free.append(number)


class Frozen:
    """A value for several processes: pickled once, its large arrays in one file that each of them maps privately.

    A process that writes into an array gets a page of its own then, as after fork. The file has no name: it ends with
    the last process that has it open. of_main: the functions and classes of the main script that it needs.
    """

    def __init__(self, value: Any, table: dict | None = None):
        self.head, buffers, self.of_main = _pack(value, table)
        self.spans, size = layout(b"", buffers)
        self._file = tempfile.TemporaryFile(prefix="jaxtrain-dataset-")  # noqa: SIM115  closed in `close`
        self._file.truncate(max(size, 1))
        for (start, _), buffer in zip(self.spans[1:], buffers, strict=True):
            self._file.seek(start)
            self._file.write(buffer)
        self._file.flush()

    def ticket(self) -> "Ticket":
        return Ticket(self.head, self.spans, self._file.fileno())

    def close(self) -> None:
        """Let go of the file; who has it mapped keeps it."""
        self._file.close()


class Ticket:
    """Hold what another process needs to rebuild a Frozen value; passed with the descriptor when it starts."""

    def __init__(self, head: bytes, spans: list[tuple[int, int]], handle: int):
        self.head, self.spans, self.handle = head, spans, handle

    def __reduce__(self) -> tuple:
        return _received, (self.head, self.spans, reduction.DupFd(self.handle))

    def thaw(self) -> Any:
        view = memoryview(mmap.mmap(self.handle, 0, access=mmap.ACCESS_COPY))
        return pickle.loads(self.head, buffers=[view[start:end] for start, end in self.spans[1:]])


def _received(head: bytes, spans: list[tuple[int, int]], handle: Any) -> Ticket:
    return Ticket(head, spans, handle.detach())
