"""A number on the device that is read when it is wanted."""

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxtrain.errors import UserError


class LazyScalar:
    """A scalar on the device. Reading it (`float(loss)`, `loss.item()`, f"{loss:.3f}") waits for the step; keeping it
    or adding it to others does not. torch's functions and a tensor's methods (`torch.isfinite(loss)`, `loss.mean()`)
    take it for the tensor that it holds; it carries no gradient."""

    __slots__ = ("array",)
    __hash__ = object.__hash__  # as a tensor's

    def __init__(self, array: Any):
        self.array = array

    def item(self) -> float:
        return float(self)

    def __float__(self) -> float:
        return float(np.asarray(self.array))

    def tensor(self) -> Any:
        """Return the value as a torch tensor on the CPU. Waits for the step."""
        from torch_bridge.datasets import to_torch

        return to_torch(np.array(self.array))

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return func(*map(_as_tensor, args), **{name: _as_tensor(value) for name, value in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "array":  # protocols of others; an object that is being unpickled
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __int__(self) -> int:
        return int(float(self))

    def __round__(self, digits: int | None = None) -> float:
        return round(float(self), digits)

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

    def _with(self, other: Any, operate: Callable) -> Any:
        if not isinstance(other, LazyScalar) and hasattr(type(other), "__torch_function__"):
            return operate(self.tensor(), other)
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

    def __rtruediv__(self, other):
        return self._with(other, lambda a, b: b / a)

    def __pow__(self, other):
        return self._with(other, lambda a, b: a**b)

    def __neg__(self):
        return LazyScalar(-self.array)

    def __abs__(self):
        return LazyScalar(abs(self.array))

    def __eq__(self, other):
        return float(self) == float(other) if hasattr(other, "__float__") else NotImplemented

    def __lt__(self, other):
        return float(self) < float(other)

    def __gt__(self, other):
        return float(self) > float(other)

    def __le__(self, other):
        return float(self) <= float(other)

    def __ge__(self, other):
        return float(self) >= float(other)


def _as_tensor(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_as_tensor, value))
    return value.tensor() if isinstance(value, LazyScalar) else value
