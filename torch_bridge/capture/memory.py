"""Tensors as arrays and arrays as tensors without a copy, in the order in which the numbers lie in memory.

An array that a program has made lives as long as the tensor that shows it. A tensor's memory is read only while a
program runs, and a program's results are complete before torch sees them.
"""

import math
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torch_bridge.capture.aten_program import fits
from torch_bridge.datasets import in_host_memory
from torch_bridge.exchange import to_array

Order = tuple[int, ...] | None  # axes from the outermost in memory to the innermost; None: as they are

_MADE: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()  # results of programs, by address
_BITS = {torch.bfloat16: np.dtype(np.uint16)}  # numpy has no such numbers


class Input:
    """A tensor that a program reads at one place, call after call.

    fixed: it is the same tensor each time, as a parameter is; its array is kept.
    """

    def __init__(self, fixed: bool):
        self._fixed = fixed
        self._kept: tuple[int, jax.Array, Order] | None = None

    def read(self, tensor: torch.Tensor) -> tuple[Any, Order]:
        """Return the tensor's memory as an array whose axes are in `order`, and the order. int64 that fits is int32."""
        address = tensor.data_ptr()
        kept = self._kept
        if kept is not None and kept[0] == address and kept[1].size == tensor.numel():
            return kept[1], kept[2]
        tensor = tensor.detach()
        order = None
        if not tensor.is_contiguous():
            order = dense_order(tensor.shape, tensor.stride())
            tensor = tensor.contiguous() if order is None else tensor.permute(order)
        made = _MADE.get(address) if tensor.numel() else None
        if made is not None and made.shape == tensor.shape and jnp.dtype(made.dtype) == _dtype_of(tensor):
            return made, order
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        if tensor.is_cpu and (not self._fixed or tensor.dtype is torch.int64 or not tensor.numel()):
            return _on_host(tensor), order
        array = to_array(tensor)
        if self._fixed and (not tensor.is_cpu or array.unsafe_buffer_pointer() == address):
            self._kept = address, array, order
        return array, order


def _dtype_of(tensor: torch.Tensor) -> np.dtype:
    return jnp.dtype(str(tensor.dtype).removeprefix("torch."))


def _on_host(tensor: torch.Tensor) -> np.ndarray:
    array = in_host_memory(tensor)
    return array.astype(np.int32) if array.dtype == np.int64 and fits(array) else array


class Layout:
    """How a result lies in memory: shape and strides as torch has traced them, which code after it may rely on.

    order: of the axes in memory. repeated: axes that show one number again and again (stride 0).
    """

    def __init__(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype):
        self.shape, self.strides, self.dtype = tuple(shape), tuple(strides), dtype
        self.repeated = tuple(a for a, (n, s) in enumerate(zip(shape, strides, strict=True)) if not s and n > 1)
        stored = [1 if a in self.repeated else n for a, n in enumerate(shape)]
        plain = _steps(stored)
        pairs = zip(stored, strides, plain, strict=True)
        self.order = None if all(n <= 1 or s == p for n, s, p in pairs) else dense_order(stored, strides)
        steps = _stored_steps(stored, self.order)
        self.gaps = any(n > 1 and s != p for n, s, p in zip(stored, strides, steps, strict=True)) and math.prod(stored)

    def store(self, array: jax.Array) -> jax.Array:
        """Return the array, inside a program, as it shall lie in memory."""
        for axis in self.repeated:
            array = jax.lax.slice_in_dim(array, 0, 1, axis=axis)
        return array if self.order is None else jnp.transpose(array, self.order)

    def show(self, array: jax.Array) -> torch.Tensor:
        """Return a stored result as a tensor that torch may write to."""
        tensor = as_tensor(array, self.dtype)
        if self.order is not None:
            tensor = tensor.permute(_inverse(self.order))
        if self.repeated:
            tensor = tensor.expand(self.shape)
        if self.gaps:  # numbers with room between them, as in a slice of a wider tensor
            tensor = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=tensor.device).copy_(tensor)
        return tensor


def dense_order(shape: Sequence[int], strides: Sequence[int]) -> Order:
    """Return the order in which the axes lie in memory without gaps; None if there is no such order, or if it is that
    of a contiguous tensor."""
    order = tuple(sorted(range(len(shape)), key=lambda axis: (-strides[axis], shape[axis] > 1)))
    steps = _stored_steps(shape, order)
    dense = all(n <= 1 or s == p for n, s, p in zip(shape, strides, steps, strict=True))
    return order if dense and order != tuple(range(len(shape))) else None


def _steps(shape: Sequence[int]) -> list[int]:
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= max(size, 1)
    return steps[::-1]


def _stored_steps(shape: Sequence[int], order: Order) -> list[int]:
    """Return the strides of a tensor whose axes lie in memory in this order."""
    if order is None:
        return _steps(shape)
    steps = _steps([shape[axis] for axis in order])
    return [steps[place] for place in _inverse(order)]


def _inverse(order: Sequence[int]) -> list[int]:
    places = [0] * len(order)
    for place, axis in enumerate(order):
        places[axis] = place
    return places


class _Memory:
    """An array's memory as numpy takes it, writable; it keeps the array alive."""

    def __init__(self, array: jax.Array, dtype: np.dtype):
        self.array = array
        self.__array_interface__ = {
            "data": (array.unsafe_buffer_pointer(), False),
            "shape": array.shape,
            "typestr": dtype.str,
            "version": 3,
        }


def as_tensor(array: jax.Array, dtype: torch.dtype) -> torch.Tensor:
    """Return a finished program's result as a tensor in the same memory, or in new memory for another dtype."""
    if not array.size:
        return torch.empty(array.shape, dtype=dtype)
    if next(iter(array.devices())).platform != "cpu":
        tensor = torch.from_dlpack(array)
    else:
        bits = np.dtype(np.uint16) if array.dtype == jnp.bfloat16 else np.dtype(array.dtype)
        tensor = torch.from_numpy(np.asarray(_Memory(array, bits)))
        tensor = tensor.view(torch.bfloat16) if array.dtype == jnp.bfloat16 else tensor
    _MADE[tensor.data_ptr()] = array
    return tensor if tensor.dtype is dtype else tensor.to(dtype)
