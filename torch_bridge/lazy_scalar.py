"""Scalars on the device that are read only when their value is used."""

import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from jaxtrain.errors import UserError
from torch_bridge.datasets import to_torch


class LazyScalar(torch.Tensor):
    """A scalar on the device that looks to torch like a detached CPU tensor. Reading it (`float(loss)`,
    `torch.tensor(losses)`, f"{loss:.3f}") waits for the step; storing it or adding it to others does not.

    array: of JAX or numpy; integers become int64, as in torch.
    """

    array: Any
    _read: torch.Tensor | None
    __hash__ = object.__hash__

    @staticmethod
    def __new__(cls, array: Any) -> "LazyScalar":
        made = torch.Tensor._make_wrapper_subclass(cls, array.shape, dtype=_dtype(array))
        made.array, made._read = array, None
        return made

    def tensor(self) -> torch.Tensor:
        """Return the value as a plain tensor, the same one at every call. Waits for the step."""
        if self._read is None:
            self._read = to_torch(np.array(self.array)).to(_dtype(self.array))
        return self._read

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*map(_plain, args), **{name: _plain(value) for name, value in (kwargs or {}).items()})

    __torch_dispatch__ = __torch_function__  # for reads by torch's C++ code: torch.tensor(losses), a collective

    def __round__(self, digits: int | None = None) -> float:
        return round(self.item(), digits)

    def detach(self) -> "LazyScalar":
        return self

    def cpu(self, *args: Any, **kwargs: Any) -> "LazyScalar":
        return self

    def numpy(self, *, force: bool = False) -> np.ndarray:
        return self.tensor().numpy(force=force)

    @property
    def data(self) -> "LazyScalar":
        return self

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Raise UserError: the compiled step has already run backward."""
        raise UserError(
            "loss.backward(): the compiled step has run backward and the optimizer already; remove backward(), "
            "optimizer.step() and optimizer.zero_grad() from the loop"
        )

    def _lazy(self) -> bool:
        """Return True for a real scalar whose tensor torch has not written to."""
        written = self._read is not None and self._read._version > 0
        return not written and self.array.shape == () and self.array.dtype.kind == "f"


def in_buffers(modules: Iterable[torch.nn.Module]) -> None:
    """Replace LazyScalars that were set as buffers (`module.last_loss = loss`) by plain tensors."""
    for part in (part for module in modules for part in module.modules()):
        for name, buffer in part._buffers.items():
            if isinstance(buffer, LazyScalar):
                part._buffers[name] = buffer.tensor()


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    return value.tensor() if isinstance(value, LazyScalar) else value


def _dtype(array: Any) -> torch.dtype:
    return torch.int64 if array.dtype.kind in "iu" else to_torch(np.zeros((), array.dtype)).dtype


def _operand(value: Any) -> Any:
    """Return the value to compute with on the device; None if torch has to compute."""
    if isinstance(value, LazyScalar):
        return value.array if value._lazy() else None
    return float(value) if isinstance(value, (int, float, np.floating, np.integer)) else None


def _computed(operate: Callable, *values: Any) -> Any:
    operands = [_operand(value) for value in values]
    if any(operand is None for operand in operands):
        return operate(*map(_plain, values))
    return LazyScalar(operate(*operands))


def _arithmetic(name: str) -> tuple[Callable, Callable, Callable]:
    """Return the forward, reflected and in-place forms of an operator, computed on the device where possible."""
    operate, in_place = getattr(operator, name), getattr(operator, f"i{name}")

    def forwards(self: LazyScalar, other: Any) -> Any:
        return _computed(operate, self, other)

    def reflected(self: LazyScalar, other: Any) -> Any:
        return _computed(operate, other, self)

    def within(self: LazyScalar, other: Any) -> LazyScalar:
        found = _computed(operate, self, other) if self._read is None else None
        if isinstance(found, LazyScalar):
            self.array = found.array
        else:
            in_place(self.tensor(), _plain(other))
        return self

    return forwards, reflected, within


for _name in ("add", "sub", "mul", "truediv", "pow"):
    for _form, _method in zip(("__", "__r", "__i"), _arithmetic(_name), strict=True):
        setattr(LazyScalar, f"{_form}{_name}__", _method)
