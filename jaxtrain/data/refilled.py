"""Samples in memory that the dataset fills anew for the next one.

torch collates a batch once all its items are read, so that each of these then holds the last sample. A reader copies
large arrays as they come, which gives the same batch for any other dataset.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxtrain.data.collate import as_array, is_tensor


def same(first: Any, second: Any) -> bool:
    """Return True unless two values differ: nested mappings and sequences by their parts, arrays by their bits. Objects
    that are neither count as equal."""
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (tuple, list)):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, np.ndarray) or is_tensor(first):
        one, other = _host(first), _host(second)
        return one is None or other is None or (one.shape == other.shape and one.tobytes() == other.tobytes())
    if isinstance(first, (str, bytes, int, float, np.generic)):
        return bool(first == second or (first != first and second != second))
    return True


def _host(value: Any) -> np.ndarray | None:
    try:
        return as_array(value)
    except Exception:  # sparse, nested: compared by nobody
        return None
