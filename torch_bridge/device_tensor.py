"""Tensors whose values lie in an array on the devices, split over them: gradients, and what a backward pass needs.

Sums, scaling and norms, with which loops clip gradients and add them up, are computed where the array lies. Anything
else gathers the values into a plain tensor first, which from then on holds them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import _pytree as pytree

from torch_bridge.datasets import to_torch


class _Values:
    """The values that a DeviceTensor and its aliases share. tensor: holds them once torch has seen them."""

    def __init__(self, array: jax.Array, dtype: torch.dtype):
        self._array, self._dtype = array, dtype
        self._sharding = array.sharding
        self.tensor: torch.Tensor | None = None

    @property
    def array(self) -> jax.Array:
        if self.tensor is None:
            return self._array
        return jax.device_put(np.array(_numpy(self.tensor), self._array.dtype), self._sharding)

    @array.setter
    def array(self, array: jax.Array) -> None:
        self._array = array

    def gathered(self) -> torch.Tensor:
        if self.tensor is None:
            self.tensor = to_torch(np.array(self._array)).to(self._dtype)
        return self.tensor


class DeviceTensor(torch.Tensor):
    """A tensor of torch's dtype and strides whose values are `array`. saved_at: count of updates when it was made."""

    values: _Values
    saved_at: int
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    __hash__ = torch.Tensor.__hash__

    @staticmethod
    def __new__(
        cls, values: _Values, shape: tuple, strides: tuple, dtype: torch.dtype, saved_at: int = -1
    ) -> "DeviceTensor":
        made = torch.Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=dtype)
        made.values, made.saved_at = values, saved_at
        return made

    @property
    def array(self) -> jax.Array:
        return self.values.array

    def plain(self) -> torch.Tensor:
        """Return a tensor of torch's with the values, the same one at every call; it may be written to."""
        return self.values.gathered()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        rule = _ON_DEVICES.get(function)
        if rule is not None and not kwargs:
            result = rule(*args)
            if result is not NotImplemented:
                return result
        sources = {}
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, DeviceTensor):
                sources.setdefault(id(leaf.plain()), leaf)
        results = function(*_plain(args), **_plain(kwargs or {}))
        return pytree.tree_map(lambda value: sources.get(id(value), value), results)  # x.mul_(2) returns x

    @property
    def data(self) -> torch.Tensor:
        return self.plain()

    def numpy(self, *, force: bool = False) -> np.ndarray:
        return self.plain().numpy(force=force)

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        return self.plain().__array__(*args, **kwargs)

    def tolist(self) -> Any:
        return self.plain().tolist()

    def data_ptr(self) -> int:
        return self.plain().data_ptr()

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return self.plain().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def __repr__(self, **options: Any) -> str:
        return self.plain().__repr__(**options)


def of_array(
    array: jax.Array, dtype: torch.dtype, strides: tuple[int, ...] | None = None, saved_at: int = -1
) -> DeviceTensor:
    """Return an array as a tensor. strides: those that torch shall see; default: of a contiguous tensor."""
    if strides is None:
        strides = torch.empty(array.shape, device="meta").stride()
    return DeviceTensor(_Values(array, dtype), tuple(array.shape), tuple(strides), dtype, saved_at)


def gathered(value: Any) -> Any:
    """Return a DeviceTensor as a plain tensor, anything else as it is."""
    return value.plain() if isinstance(value, DeviceTensor) else value


def _plain(values: Any) -> Any:
    return pytree.tree_map(gathered, values)


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    return tensor.float().numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()


def _like(tensor: DeviceTensor, values: _Values) -> DeviceTensor:
    return DeviceTensor(values, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.saved_at)


def _seen(*tensors: Any) -> bool:
    """Return True unless all values lie on the devices alone."""
    return any(not isinstance(tensor, DeviceTensor) or tensor.values.tensor is not None for tensor in tensors)


def _factor(value: Any, like: DeviceTensor) -> Any:
    """Return a number, or a tensor of one, as an operand that leaves the dtype as it is; None for anything else."""
    if isinstance(value, torch.Tensor) and (
        isinstance(value, DeviceTensor) or value.dim() or value.dtype != like.dtype
    ):
        return None
    number = value.item() if isinstance(value, torch.Tensor) else value
    return jnp.asarray(number, like.array.dtype) if isinstance(number, int | float) else None


def _detach(x: DeviceTensor) -> Any:
    return _like(x, x.values)


def _clone(x: DeviceTensor) -> Any:
    return NotImplemented if _seen(x) else _like(x, _Values(x.array, x.dtype))


def _alike(x: Any, y: Any) -> bool:
    return not _seen(x, y) and x.shape == y.shape and x.dtype == y.dtype and x.is_floating_point()


def _add(x: Any, y: Any) -> Any:
    return _like(x, _Values(x.array + y.array, x.dtype)) if _alike(x, y) else NotImplemented


def _add_in_place(x: Any, y: Any) -> Any:
    if not _alike(x, y):
        return NotImplemented
    x.values.array = x.array + y.array
    return x


def _scaled(operate: Callable, in_place: bool) -> Callable:
    def rule(x: Any, y: Any) -> Any:
        factor = None if _seen(x) or not x.is_floating_point() else _factor(y, x)
        if factor is None:
            return NotImplemented
        array = operate(x.array, factor)
        if not in_place:
            return _like(x, _Values(array, x.dtype))
        x.values.array = array
        return x

    return rule


def _zero(x: DeviceTensor) -> Any:
    if _seen(x):
        return NotImplemented
    x.values.array = jnp.zeros_like(x.array)
    return x


def _norm(x: Any, order: Any = 2, axes: Any = None, keep: bool = False) -> Any:
    if _seen(x) or order != 2 or axes is not None or keep or x.dtype is not torch.float32:
        return NotImplemented
    return torch.tensor(float(jnp.sqrt(jnp.sum(jnp.square(x.array)))))


_aten = torch.ops.aten
_ON_DEVICES: dict[Any, Callable] = {
    _aten.detach.default: _detach,
    _aten.clone.default: _clone,
    _aten.add.Tensor: _add,
    _aten.add_.Tensor: _add_in_place,
    _aten.mul.Tensor: _scaled(jnp.multiply, False),
    _aten.mul_.Tensor: _scaled(jnp.multiply, True),
    _aten.div.Tensor: _scaled(jnp.divide, False),
    _aten.div_.Tensor: _scaled(jnp.divide, True),
    _aten.zero_.default: _zero,
    _aten.linalg_vector_norm.default: _norm,
}
