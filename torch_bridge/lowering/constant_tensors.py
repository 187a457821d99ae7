"""Values of tensors from outside every state dict, which a graph holds as constants."""

import weakref
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch

from torch_bridge.datasets import to_numpy

LARGE_BYTES = 1 << 20  # constants from this size on are arrays on the device, which a program may take as inputs

_HELD: weakref.WeakValueDictionary[tuple, jax.Array] = weakref.WeakValueDictionary()  # large constants of all graphs


def copied(tensor: torch.Tensor) -> np.ndarray | jax.Array:
    """Copy a constant's values, as torch may write to it: a large one to the device, once for all graphs."""
    values = to_numpy(tensor)
    if values.nbytes < LARGE_BYTES or values.dtype.itemsize > 4:  # wider ones are narrowed where they are used
        return np.array(values)
    values = np.ascontiguousarray(values)
    key = values.shape, values.dtype.name, values.ctypes.data, zlib.crc32(values.reshape(-1).view(np.uint8).data)
    if (held := _HELD.get(key)) is None:
        with jax.ensure_compile_time_eval():  # a graph may be recorded while a program is traced
            held = _HELD[key] = jax.device_put(np.array(values))
    return held


def tables(constants: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Return the large constants by the names that they have among a program's state: a program that takes them so
    holds no copy of them, in memory or in the compile cache."""
    return {_state_name(name): value for name, value in constants.items() if isinstance(value, jax.Array)}


def chosen(constants: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constants, as far as the program took them from its state."""
    return {name: state.get(_state_name(name), value) for name, value in constants.items()}


def on_host(constants: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constants with large ones in host memory."""
    return {name: np.asarray(value) if isinstance(value, jax.Array) else value for name, value in constants.items()}


def _state_name(placeholder: str) -> str:
    return f"constant {placeholder}"
