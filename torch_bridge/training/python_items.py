"""Texts and numbers of Python's that a batch holds beside its tensors, and that differ from batch to batch."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from torch_bridge.lowering.python.numbers import Given, Number, Paths

PATH = "path"
_ITEM = "item"  # a mark in place of each
_MOST = 2**31  # what is greater is no number of a compiled step


class PythonItems:
    """Stand-ins for them in a recorded function, which may compute with the numbers, compare and hand on the rest."""

    def __init__(self, name: str):
        """name: of the function, for messages."""
        self.paths = Paths(name)

    def arrays(
        self, batch: Any, numbers: Mapping[str, Any], array: Callable = np.asarray
    ) -> tuple[Any, dict[str, Any]]:
        """Return the batch with marks in place of its items, and what the step gets for these and for further numbers.

        array: makes numbers 0-d arrays, or tensors.
        """
        values = dict(numbers)

        def mark(leaf: Any, place: str) -> Any:
            if leaf is None or isinstance(leaf, bool) or hasattr(leaf, "shape"):
                return leaf
            values[place] = leaf
            return _ITEM

        batch = _mapped(mark, batch, _ITEM)
        integer, real = (np.int32, np.float32) if array is np.asarray else (torch.int32, torch.float32)
        arrays = {
            name: array(value, dtype=integer if isinstance(value, int) else real)
            for name, value in values.items()
            if isinstance(value, (int, float)) and abs(value) < _MOST
        }
        return batch, {PATH: self.paths.of(values), **arrays}

    def stand_ins(self, arrays: Mapping[str, Any]) -> dict[str, Number]:
        """Return what stands for each number and item while the function is recorded. arrays: as the step gets them."""
        path, values = self.paths.known[arrays[PATH]], self.paths.values
        return {
            name: path.number(name, values, arrays[name]) if name in arrays else Given(path, name, value)
            for name, value in values.items()
        }

    @staticmethod
    def put(batch: Any, stand_ins: Mapping[str, Number]) -> Any:
        """Return the batch with its items' stand-ins in place of the marks."""
        return _mapped(lambda leaf, place: stand_ins[place] if isinstance(leaf, str) else leaf, batch, _ITEM)


def _mapped(function: Callable, batch: Any, place: str) -> Any:
    """The batch with this function's values, given a leaf and its place, in place of its leaves."""
    if isinstance(batch, Mapping):
        return {key: _mapped(function, value, f"{place} {key}") for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        values = [_mapped(function, value, f"{place} {number}") for number, value in enumerate(batch)]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return function(batch, place)
