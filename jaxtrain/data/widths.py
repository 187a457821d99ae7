"""Narrow batches to the 32 bits that JAX computes in, and detect values that would lose by it."""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxtrain.errors import UserError

_KEEPS_FLOAT64 = contextvars.ContextVar("keeps_float64", default=False)


class TooLarge(UserError):
    """Raised for an integer that does not fit into 32 bits. row: its row of the batch."""

    def __init__(self, value: int, row: int):
        super().__init__(f"an integer of the dataset ({value}) does not fit into 32 bits, which JAX counts in")
        self.row = row


@contextlib.contextmanager
def float64_kept() -> Iterator[None]:
    """Keep float64 entries of batches as float64 in this context, to check what float32 would lose."""
    token = _KEEPS_FLOAT64.set(True)
    try:
        yield
    finally:
        _KEEPS_FLOAT64.reset(token)


def narrow(array: np.ndarray) -> np.ndarray:
    """Convert to the 32 bits JAX computes in: int64 -> int32, float64 -> float32. Raises UserError if a value doesn't
    fit."""
    if array.dtype == np.float64:
        return array if _KEEPS_FLOAT64.get() else array.astype(np.float32)
    if array.dtype in (np.int64, np.uint64):
        least, most = np.iinfo(np.int32).min, np.iinfo(np.int32).max
        if array.size and (array.max() > most or array.min() < least):
            first = np.argwhere((array > most) | (array < least))[0]
            raise TooLarge(int(array[tuple(first)]), int(first[0]) if len(first) else 0)
        return array.astype(np.int32)
    return array


def float32_may_lose(batch: Mapping[str, Any]) -> bool:
    """Return True if float32 may lose information of a batch's float64 entries.

    That is so if they lose more than 1e-3, or if neighbouring values differ by less than 1e-4 of the largest.
    """
    return any(_may_lose(value) for value in _entries(batch) if getattr(value, "dtype", None) == np.float64)


def _entries(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, tuple):
        for inner in value:
            yield from _entries(inner)
    else:
        yield value


def _may_lose(array: np.ndarray) -> bool:
    with np.errstate(over="ignore", invalid="ignore"):
        error = np.abs(array - array.astype(np.float32))
    if not array.size or not np.nanmax(error) > 0:
        return False
    steps = [np.abs(np.diff(array, axis=axis)) for axis in range(array.ndim)]
    size = np.nanmax(np.abs(array))
    return bool(np.nanmax(error) > 1e-3 or any(((step > 0) & (step < 1e-4 * size)).any() for step in steps))
