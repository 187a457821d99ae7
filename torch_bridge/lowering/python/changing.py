"""Python numbers among the inputs of a record that differ from call to call."""

from collections.abc import Sequence
from typing import Any

import numpy as np


class ChangingNumber:
    """A Python number that is an input of a record rather than a constant.

    The record has it as a 0-d tensor of this dtype: float32 for a float, which leaves float32 tensors float32.
    """

    __slots__ = ("dtype", "value")
    shape = ()

    def __init__(self, value: int | float | np.number):
        self.value = value
        self.dtype = np.dtype(np.float32 if isinstance(value, (float, np.floating)) else np.int64)


def values_of(inputs: Sequence[Any]) -> dict[int, Any]:
    """Return the values of the changing numbers among these inputs, by position."""
    return {place: leaf.value for place, leaf in enumerate(inputs) if isinstance(leaf, ChangingNumber)}


def forms(inputs: Sequence[Any]) -> tuple[tuple, ...]:
    """Return what a program depends on: shapes and dtypes of arrays, types of changing numbers, other values."""
    return tuple(
        (ChangingNumber, type(leaf.value))
        if isinstance(leaf, ChangingNumber)
        else (tuple(leaf.shape), leaf.dtype)
        if hasattr(leaf, "shape")
        else (type(leaf), leaf)
        for leaf in inputs
    )
