"""Arrays that are read on use, so that a checkpoint is converted one array at a time."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class LazyArray:
    """An array known by shape and dtype. `read` and `np.asarray(leaf)` fetch it; no copy is kept.

    fresh: `read` returns memory that nothing else uses, as from a file; otherwise the memory may change while in use.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]
    fresh: bool = False

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        array = self.read()
        if dtype is not None and array.dtype != dtype:
            return array.astype(dtype)
        return array.copy() if copy and not self.fresh else array

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def astype(self, dtype) -> "LazyArray":
        return LazyArray(self.shape, np.dtype(dtype), lambda: self.read().astype(dtype, copy=False), self.fresh)


def as_bytes(leaf: Any) -> memoryview:
    """Return the numbers of an array or LazyArray, of any dtype, as a file's `write` takes them. `tofile` does not tell
    why it fails."""
    return np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data


ALIGNMENT = 64  # bytes; XLA on a CPU uses an array aligned like this in place and copies others


def read_file(path: pathlib.Path, dtype: np.dtype, count: int, offset: int) -> np.ndarray:
    """Read up to `count` numbers of a file from byte `offset` on, into new memory."""
    size = count * np.dtype(dtype).itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    room = memory.data[start : start + size]
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        done = 0
        while done < size and (got := file.readinto(room[done:])):
            done += got
    return memory[start : start + done - done % np.dtype(dtype).itemsize].view(dtype)


def own_array(value: Any) -> np.ndarray:
    """Copy the array: torch's tensors share their memory, and JAX on a CPU would share it too."""
    return np.array(value, copy=True)


def as_leaf(value: Any) -> Any:
    """Return a torch tensor or JAX array as a LazyArray, numpy arrays and LazyArrays unchanged, anything else as an
    array."""
    if isinstance(value, jax.Array):
        return LazyArray(value.shape, np.dtype(value.dtype), lambda: to_host(value))
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        return _of_tensor(value)
    return value if isinstance(value, (LazyArray, np.ndarray)) else np.asarray(value)


def _of_tensor(tensor: Any) -> LazyArray:
    """Wrap a torch tensor by its own methods: torch is not imported here. numpy has no bfloat16 or float8; float32
    holds their values exactly."""
    name = str(tensor.dtype).removeprefix("torch.")
    if hasattr(ml_dtypes, name):
        dtype = np.dtype(getattr(ml_dtypes, name))
        return LazyArray(tuple(tensor.shape), dtype, lambda: tensor.detach().cpu().float().numpy().astype(dtype))
    plain = lambda: tensor.detach().cpu().resolve_conj().resolve_neg().numpy()
    return LazyArray(tuple(tensor.shape), np.dtype(name), plain)


def to_host(array: Any) -> np.ndarray:
    """Return the whole array in host memory, on every process, whatever its sharding."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return np.asarray(array)
    if array.is_fully_replicated:
        return np.asarray(array.addressable_data(0))
    from jax.experimental.multihost_utils import process_allgather

    return np.asarray(process_allgather(array, tiled=True))


def is_leaf(value: Any) -> bool:
    return isinstance(value, (LazyArray, np.ndarray))


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to every LazyArray and array in nested dicts, lists and tuples; keep other values."""
    if is_leaf(tree):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: map_leaves(function, value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_leaves(function, value) for value in tree)
    return tree
