"""A number on the device that is read when it is wanted."""

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxtrain.errors import UserError


class LazyScalar:
    """A scalar on the device. Reading it (`float(loss)`, `loss.item()`, f"{loss:.3f}") waits for the step; keeping it
    or adding it to others does not."""

    __slots__ = ("array",)

    def __init__(self, array: Any):
        self.array = array

    def item(self) -> float:
        return float(self)

    def __float__(self) -> float:
        return float(np.asarray(self.array))

    def __bool__(self) -> bool:
        return bool(float(self))

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __repr__(self) -> str:
        return f"LazyScalar({float(self):.6g})"

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.array, dtype)

    def detach(self) -> "LazyScalar":
        return self

    cpu = detach

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Raises UserError: the step has done so."""
        raise UserError(
            "loss.backward(): the compiled step has run backward and the optimizer already; remove backward(), "
            "optimizer.step() and optimizer.zero_grad() from the loop"
        )

    def _with(self, other: Any, operate: Callable) -> "LazyScalar":
        return LazyScalar(operate(self.array, other.array if isinstance(other, LazyScalar) else other))

    def __add__(self, other):
        return self._with(other, lambda a, b: a + b)

    __radd__ = __add__

    def __sub__(self, other):
        return self._with(other, lambda a, b: a - b)

    def __rsub__(self, other):
        return self._with(other, lambda a, b: b - a)

    def __mul__(self, other):
        return self._with(other, lambda a, b: a * b)

    __rmul__ = __mul__

    def __truediv__(self, other):
        return self._with(other, lambda a, b: a / b)

    def __lt__(self, other):
        return float(self) < float(other)

    def __gt__(self, other):
        return float(self) > float(other)

    def __le__(self, other):
        return float(self) <= float(other)

    def __ge__(self, other):
        return float(self) >= float(other)
