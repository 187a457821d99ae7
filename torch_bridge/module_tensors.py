"""Copy a module's tensors to arrays, by name, and back."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import torch

from torch_bridge.awaited import (
    Awaited,
    before_optimizer,
    plainly,
    refuse_other_optimizers,
    settle,
    state_tensors,
)
from torch_bridge.datasets import is_dense, to_numpy, to_torch
from torch_bridge.double_values import holds, tell_changed
from torch_bridge.exchange import Queue, is_on, products, to_host, to_tensor
from torch_bridge.exchange import settle as wait_for_torch
from torch_bridge.lazy_array import to_host as whole
from torch_bridge.lowering.errors import WideIntegers
from torch_bridge.lowering.ready import device_of
from torch_bridge.lowering.wide_integers import as_wide, fits

__all__ = [
    "Awaited", "Queue", "as_wide", "before_optimizer", "device_of", "is_parameter", "narrow", "of_numpy", "plainly",
    "products", "refuse_other_optimizers", "settle", "snapshot", "state_tensors", "tell_changed", "to_array",
    "to_tensors", "trainable", "write",
]  # fmt: skip
CPU = torch.device("cpu")


def snapshot(modules: Mapping[str, torch.nn.Module]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return every parameter and buffer once, by name, and {tied name: the name that represents it}.

    With several modules, names begin with the module's name. Sparse buffers stay torch's: no program reads them.
    """
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, module in modules.items():
        for key, tensor in _named(module, "" if len(modules) == 1 else f"{name}."):
            if first.setdefault(id(tensor), key) == key:
                tensors[key] = tensor
            else:
                aliases[key] = first[id(tensor)]
    return tensors, aliases


def _named(module: torch.nn.Module, prefix: str) -> list[tuple[str, torch.Tensor]]:
    """List every parameter, then every buffer, in the order of torch's named_parameters, which is ten times slower."""
    parameters: list[tuple[str, torch.Tensor]] = []
    buffers: list[tuple[str, torch.Tensor]] = []
    waiting = [(prefix, module)]
    while waiting:
        path, inner = waiting.pop()
        parameters += [(path + key, value) for key, value in inner._parameters.items() if value is not None]
        buffers += [
            (path + key, value) for key, value in inner._buffers.items() if value is not None and is_dense(value)
        ]
        children = [(f"{path}{key}.", child) for key, child in inner._modules.items() if child is not None]
        waiting += reversed(children)
    return parameters + buffers


def is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def trainable(tensors: Mapping[str, torch.Tensor]) -> Callable[[], tuple[str, ...]]:
    """Return a function that lists the names of the parameters that require a gradient at the time of its call."""
    return lambda: tuple(
        name for name, tensor in tensors.items() if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad
    )


def to_tensors(outputs: Any, device: torch.device = CPU) -> Any:
    """Copy arrays into new tensors on a device, in the same containers; int32 becomes int64, torch's default
    integer."""

    def one(value: Any) -> Any:
        if not hasattr(value, "dtype"):
            return value
        if is_on(device, value):
            return to_tensor(value)
        tensor = to_torch(np.asarray(value))
        return (tensor.long() if tensor.dtype is torch.int32 else tensor).to(device)

    return jax.tree.map(one, outputs)


def to_array(tensor: torch.Tensor, wide: bool = False) -> np.ndarray | jax.Array:
    """Copy the tensor's values into an array in JAX's dtypes; int64 stays if `wide`, or if the values need it."""
    return of_numpy(np.array(to_numpy(tensor)), wide)


def of_numpy(array: np.ndarray, wide: bool = False) -> np.ndarray | jax.Array:
    """Return an array in JAX's dtypes, as `to_array`."""
    return as_wide(array) if array.dtype == np.int64 and (wide or not fits(array)) else narrow(array)


def narrow(value: Any) -> Any:
    """Convert a value to 32 bits, in which JAX computes. Raises WideIntegers if an integer does not fit."""
    if isinstance(value, jax.Array) and value.dtype.itemsize <= 4:
        return value
    array = np.asarray(value)
    if array.dtype == np.float64:
        return array.astype(np.float32)
    if array.dtype in (np.int64, np.uint64):
        limits = np.iinfo(np.int32)
        if array.size and (array.max() > limits.max or array.min() < limits.min):
            raise WideIntegers(f"an integer ({array.max()}) does not fit into 32 bits, which JAX counts in")
        return array.astype(np.int32)
    return array


def write(tensors: Mapping[str, torch.Tensor], arrays: Mapping[str, Any]) -> None:
    """Copy arrays into the tensors of the same names, in place; keep the tensors' dtypes and devices. Leave float64
    values alone that the arrays hold rounded. Arrays on the tensor's own GPU do not leave it."""
    near = {name for name, tensor in tensors.items() if is_on(tensor.device, arrays[name])}
    host = to_host({name: array for name, array in arrays.items() if name not in near})
    with torch.no_grad():
        for name, tensor in tensors.items():
            value = torch.from_dlpack(arrays[name]) if name in near else to_torch(whole(host[name]))
            if not holds(tensor, value := value.reshape(tensor.shape)):
                tensor.copy_(value)
    wait_for_torch(tensors.values())
