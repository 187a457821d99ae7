"""Send arrays that lie in memory-mapped files to other processes as a path and a place in the file, without a copy.

Any array counts, whatever made the mapping: np.memmap, views and subclasses, np.frombuffer over an mmap.mmap, a tensor
of torch.load(mmap=True). The system's list of mappings says which file lies at an array's address.
"""

import ctypes
import dataclasses
import pathlib
from typing import Literal

import numpy as np

SMALLEST = 1 << 20  # bytes; smaller arrays are copied
MAPPINGS = pathlib.Path("/proc/self/maps")  # Linux alone has it; elsewhere arrays are copied. Source: proc_pid_maps(5)
CHUNK = 1 << 24  # bytes compared at a time
MEMORY = ("/dev/", "/memfd:", "/SYSV")  # files that are memory themselves, which their owner may remove at any time


@dataclasses.dataclass(frozen=True)
class FilePart:
    """The bytes of a file that an array spans. mode: np.memmap's. first: where in them its first element begins."""

    path: str
    mode: Literal["r", "r+", "c"]
    start: int
    size: int
    first: int

    def open(self, kind: type, shape: tuple, dtype: np.dtype, strides: tuple, writeable: bool) -> np.ndarray:
        """Map the file and return the array. Raises FileNotFoundError if the file is gone."""
        mapped = self.bytes()
        element = mapped[self.first : self.first + dtype.itemsize].view(dtype)
        array = np.lib.stride_tricks.as_strided(element, shape, strides, subok=True)
        array.flags.writeable = writeable
        return array if kind is np.memmap else np.asarray(array).view(kind)

    def bytes(self) -> np.memmap:
        return np.memmap(self.path, np.uint8, self.mode, self.start, (self.size,))


def reduced(array: np.ndarray) -> tuple | None:
    """Return how to rebuild a large array from its file, as `__reduce__` does; None if no file holds its values."""
    if array.nbytes < SMALLEST or array.dtype.hasobject or not MAPPINGS.is_file():
        return None
    part = _part(array)
    if part is None:
        return None
    return FilePart.open, (part, type(array), array.shape, array.dtype, array.strides, array.flags.writeable)


def _part(array: np.ndarray) -> FilePart | None:
    low, high = np.lib.array_utils.byte_bounds(array)
    found = _mapping(low, high)
    if found is None:
        return None
    begin, access, offset, file, path = found
    if not path.startswith("/") or path.startswith(MEMORY) or not pathlib.Path(path).is_file():
        return None  # anonymous memory, or a file that has been removed
    private = access[3] == "p"
    mode = "c" if private else "r+" if access[1] == "w" else "r"
    part = FilePart(path, mode, offset + low - begin, high - low, array.__array_interface__["data"][0] - low)
    try:
        mapped = part.bytes()
    except (OSError, ValueError):  # not to be opened (again), or shorter by now
        return None
    again = _mapping(*np.lib.array_utils.byte_bounds(mapped))
    if again is None or again[3] != file:  # another file has this path now
        return None
    changed = private and access[1] == "w" and not _equal(low, mapped)
    return None if changed else part


def _mapping(low: int, high: int) -> tuple[int, str, int, tuple[str, str], str] | None:
    """Return the mapping of these addresses: its beginning, access, offset in the file, (device, inode) and path."""
    for line in MAPPINGS.read_text(errors="surrogateescape").splitlines():
        span, access, offset, device, inode, *path = line.split(maxsplit=5)
        begin, end = (int(address, 16) for address in span.split("-"))
        if begin <= low and high <= end:
            return begin, access, int(offset, 16), (device, inode), path[0] if path else ""
    return None


def _equal(address: int, mapped: np.memmap) -> bool:
    """Return True if the bytes at an address, in a mapping whose changes stay in this process, are the file's."""
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * mapped.size).from_address(address))
    starts = range(0, mapped.size, CHUNK)
    return all(np.array_equal(memory[start : start + CHUNK], mapped[start : start + CHUNK]) for start in starts)
