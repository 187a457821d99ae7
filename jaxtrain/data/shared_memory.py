"""Send batches from a worker process to its parent through shared memory: one copy in, none out.

A segment is an unnamed file in memory, passed on by its file descriptor, so that nothing is left behind however the
processes end. The parent's arrays are views; when the last of them is freed, the segment is reused.
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

from jaxtrain.data import mapped_files
from jaxtrain.errors import DataError

ALIGNMENT = 64  # bytes; JAX uses arrays with this alignment without a copy
SMALLEST = 1 << 20  # bytes of the smallest segment
FUNCTIONS = (type, types.FunctionType)
FOLDER = pathlib.Path("/dev/shm") if pathlib.Path("/dev/shm").is_dir() else pathlib.Path(tempfile.gettempdir())


class Packing(pickle.Pickler):
    """Pickler that keeps array data out of the pickle, also of subclasses and of bfloat16 and similar dtypes, which
    numpy would put in.

    table: type -> reduce function, as in copyreg, for further types. mapped: pass arrays in memory-mapped files on by
    path.
    """

    def __init__(
        self, file: io.BytesIO, buffers: list[pickle.PickleBuffer], table: dict | None = None, mapped: bool = False
    ):
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self.table, self.mapped = table or {}, mapped
        self.of_main: list[str] = []  # functions and classes of the main script, pickled by name

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FUNCTIONS) and getattr(value, "__module__", None) == "__main__":
            self.of_main.append(value.__qualname__)
        reduce = self.table.get(type(value))
        if isinstance(value, np.ndarray) and reduce is None and _pickles_as_array(type(value)):
            if self.mapped and (found := mapped_files.reduced(value)) is not None:
                return found
            if value.dtype.kind == "V" and value.dtype.fields is None:
                plain = np.ascontiguousarray(value).view(f"u{value.dtype.itemsize}").reshape(value.shape)
                return _viewed, (plain, value.dtype, type(value))
            if type(value) is not np.ndarray and not value.dtype.hasobject:
                return _viewed, (value.view(np.ndarray), value.dtype, type(value))
        return NotImplemented if reduce is None else reduce(value)


def _pickles_as_array(kind: type) -> bool:
    """Return True for np.ndarray and subclasses that are pickled by its methods, without state of their own."""
    names = ("__reduce__", "__reduce_ex__", "__setstate__")
    return all(getattr(kind, name) is getattr(np.ndarray, name) for name in names)


def _viewed(array: np.ndarray, dtype: np.dtype, kind: type) -> np.ndarray:
    return array.view(dtype).view(kind)


def pack(value: Any, table: dict | None = None) -> tuple[bytes, list[memoryview]]:
    """Return the pickled structure of a value, and the data of its arrays."""
    return _pack(value, table)[:2]


def _pack(value: Any, table: dict | None, mapped: bool = False) -> tuple[bytes, list[memoryview], list[str]]:
    """Do the work of `pack`; return also the names of the main script's functions and classes that the value needs."""
    file, buffers = io.BytesIO(), []
    packing = Packing(file, buffers, table, mapped)
    packing.dump(value)
    return file.getvalue(), [buffer.raw() for buffer in buffers], packing.of_main


def layout(head: bytes, buffers: list[memoryview]) -> tuple[list[tuple[int, int]], int]:
    """Return (start, end) of the head and of each buffer in a segment, and the segment's size in bytes."""
    spans, end = [], 0
    for size in (len(head), *(buffer.nbytes for buffer in buffers)):
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + size
        spans.append((start, end))
    return spans, end


class Writer:
    """The worker's side: creates segments, and refills those that the parent no longer uses."""

    def __init__(self):
        self._segments: dict[int, mmap.mmap] = {}

    def write(self, value: Any, free: int | None) -> tuple[int, int | None, list[tuple[int, int]]]:
        """Write a value into a segment; return its number, its descriptor if it is new (else None), and the spans.

        free: number of a segment to reuse, if it is large enough.
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
    """Create a segment; return it and its descriptor, which the caller must close."""
    size = -(-max(size * 5 // 4, SMALLEST) // mmap.PAGESIZE) * mmap.PAGESIZE
    handle = -1
    try:
        with tempfile.TemporaryFile(prefix="jaxtrain-", dir=FOLDER) as file:  # no name: nothing to remove
            handle = os.dup(file.fileno())
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size)  # raises an error here if memory is full, not a bus error later
        else:
            os.ftruncate(handle, size)
        return mmap.mmap(handle, size), handle
    except OSError as error:
        if handle >= 0:
            os.close(handle)
        if error.errno == errno.EMFILE:
            raise  # too many open files: the dataset doesn't close its own
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
        """Return the number of a segment that no array refers to any more, None if there is none."""
        return self._free.pop() if self._free else None

    def give_back(self, number: int | None) -> None:
        if number is not None:
            self._free.append(number)

    def read(self, number: int, handle: int | None, spans: list[tuple[int, int]]) -> Any:
        """Return the value; its arrays are views into the segment. handle: a new segment's descriptor; it is closed."""
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
    """A value for several processes: pickled once, its array data in one file that each process maps privately. Arrays
    that lie in memory-mapped files are mapped from these.

    A process that writes to an array gets its own copy of the page, as after fork. The file has no name, so it vanishes
    with the last process that has it open. of_main: functions and classes of the main script that the value needs.
    """

    def __init__(self, value: Any, table: dict | None = None):
        self.head, buffers, self.of_main = _pack(value, table, mapped=True)
        self.spans, size = layout(b"", buffers)
        try:
            self._file = tempfile.TemporaryFile(prefix="jaxtrain-dataset-")  # noqa: SIM115  closed in `close`
            self._file.truncate(max(size, 1))
            for (start, _), buffer in zip(self.spans[1:], buffers, strict=True):
                self._file.seek(start)
                self._file.write(buffer)
            self._file.flush()
        except OSError as error:
            raise DataError(
                f"data.num_workers: the dataset's {size >> 20:,} MiB, from which the workers read, do not go into a "
                f"temporary file in {os.environ.get('TMPDIR') or '/tmp'}: {error.strerror}. Make room, name another "
                "folder in TMPDIR, or set data.num_workers=0"
            ) from None

    def ticket(self) -> "Ticket":
        return Ticket(self.head, self.spans, self._file.fileno())

    def close(self) -> None:
        """Close the file; processes that have mapped it keep their mapping."""
        self._file.close()


class Ticket:
    """Data that another process needs to rebuild a Frozen value; passed on with the descriptor at process start."""

    def __init__(self, head: bytes, spans: list[tuple[int, int]], handle: int):
        self.head, self.spans, self.handle = head, spans, handle

    def __reduce__(self) -> tuple:
        return _received, (self.head, self.spans, reduction.DupFd(self.handle))

    def thaw(self) -> Any:
        view = memoryview(mmap.mmap(self.handle, 0, access=mmap.ACCESS_COPY))
        return pickle.loads(self.head, buffers=[view[start:end] for start, end in self.spans[1:]])


def _received(head: bytes, spans: list[tuple[int, int]], handle: Any) -> Ticket:
    return Ticket(head, spans, handle.detach())
