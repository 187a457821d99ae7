"""Handle Python strings and numbers that a batch holds besides its tensors, and that differ from batch to batch."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from torch_bridge.lowering.python.numbers import Given, Number, Paths

PATH = "path"
_ITEM = "item"  # mark that replaces each item
_MOST = 2**31  # larger numbers are not inputs of a compiled step


class PythonItems:
    """Placeholders for such items in a recorded function, which may compute with numbers, and compare and pass on the
    rest."""

    def __init__(self, name: str):
        """name: the function's name, for messages."""
        self.paths = Paths(name)

    def arrays(
        self, batch: Any, numbers: Mapping[str, Any], array: Callable = np.asarray
    ) -> tuple[Any, dict[str, Any]]:
        """Return the batch with marks in place of its items, and the step's inputs for these and for further numbers.

        array: converts numbers to 0-d arrays, or tensors.
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
        """Return the placeholder for each number and item while the function is recorded. arrays: as the step gets
        them."""
        path, values = self.paths.known[arrays[PATH]], self.paths.values
        return {
            name: path.number(name, values, arrays[name]) if name in arrays else Given(path, name, value)
            for name, value in values.items()
        }

    @staticmethod
    def put(batch: Any, stand_ins: Mapping[str, Number]) -> Any:
        """Return the batch with its items' placeholders in place of the marks."""
        return _mapped(lambda leaf, place: stand_ins[place] if isinstance(leaf, str) else leaf, batch, _ITEM)


def _mapped(function: Callable, batch: Any, place: str) -> Any:
    """Replace every leaf of the batch by `function(leaf, place)`."""
    if isinstance(batch, Mapping):
        return {key: _mapped(function, value, f"{place} {key}") for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        values = [_mapped(function, value, f"{place} {number}") for number, value in enumerate(batch)]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return function(batch, place)
