"""Convert tensors to numpy arrays and back, inside nested dicts, lists and tuples."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

from jaxtrain.errors import UserError

_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
_VIEWS = {torch.bfloat16: (torch.int16, ml_dtypes.bfloat16)}  # numpy has no such dtype: the bits are passed as integers
_VIEWS |= {getattr(torch, name): (torch.uint8, getattr(ml_dtypes, name)) for name in _FLOAT8}
_KINDS = "? u1 i1 i2 i4 i8 f2 f4 f8 c8 c16".split()
_NUMPY = {torch.from_numpy(np.empty(0, kind)).dtype: np.dtype(kind) for kind in _KINDS}
_BACK = {np.dtype(own): (np.dtype(f"i{np.dtype(own).itemsize}"), tensor) for tensor, (_, own) in _VIEWS.items()}


class NoArray(UserError):
    """Error for a value of a batch that is no array of numbers: a sparse or nested tensor, a PackedSequence."""


def to_numpy(value: Any) -> Any:
    """Convert tensors to arrays, without a copy if they are in host memory. Keep bfloat16; return other values
    unchanged."""
    return with_arrays(value, in_host_memory)


def with_arrays(value: Any, array_of: Callable[[torch.Tensor], Any]) -> Any:
    """Replace every tensor by `array_of(tensor)`. Raises NoArray for a PackedSequence."""
    if isinstance(value, torch.Tensor):
        return array_of(value)
    if isinstance(value, torch.nn.utils.rnn.PackedSequence):
        raise NoArray(
            "a PackedSequence in a batch: its sizes are values; give the padded tensor and the lengths, and call "
            "pack_padded_sequence in the module"
        )
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(with_arrays(inner, array_of) for inner in value))
    if isinstance(value, (tuple, list)):
        return type(value)(with_arrays(inner, array_of) for inner in value)
    if isinstance(value, Mapping):
        return {key: with_arrays(inner, array_of) for key, inner in value.items()}
    return value


def in_host_memory(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as an array that shares its memory where possible. Raises NoArray unless it is dense."""
    if not is_dense(tensor):
        raise _not_dense(tensor)
    if tensor.dtype in _VIEWS:
        bits, own = _VIEWS[tensor.dtype]
        return tensor.detach().cpu().view(bits).numpy().view(own)
    return tensor.numpy(force=True)


def join(values: Sequence[Any], empty: Callable[..., np.ndarray] = np.empty) -> np.ndarray | None:
    """Stack tensors into one array [batch, ...]; return None if they differ in type, dtype or shape.

    empty: allocates the result, as np.empty does.
    """
    first = values[0]
    if set(map(type, values)) != {torch.Tensor} or not is_dense(first):
        return None
    if len({value.dtype for value in values}) > 1 or len({value.shape for value in values}) > 1:
        return None
    if first.dtype not in _NUMPY or not first.is_cpu:
        return to_numpy(torch.stack(list(values)))
    joined = empty((len(values), *first.shape), _NUMPY[first.dtype])
    with torch.no_grad():
        torch.stack(list(values), out=torch.from_numpy(joined))
    return joined


def is_dense(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is one plain array of numbers in memory."""
    return not (tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta)


def kind_of(tensor: torch.Tensor) -> str:
    """Name what a tensor that is not dense is instead."""
    if tensor.is_meta:
        return "meta"
    return "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else "sparse"


def _not_dense(tensor: torch.Tensor) -> NoArray:
    kind = kind_of(tensor)
    if kind == "meta":
        return NoArray("a tensor on the meta device has no values; make it on the CPU")
    fix = {"nested": "to_padded_tensor(0.0)", "quantized": "dequantize()", "sparse": "to_dense()"}[kind]
    return NoArray(f"a {kind} tensor is no dense array, which a batch is made of; return tensor.{fix}")


def to_torch(array: Any) -> torch.Tensor:
    """Copy a numpy (or host JAX) array into a new tensor; keep bfloat16."""
    array = np.array(array)
    if array.dtype in _BACK:
        bits, own = _BACK[array.dtype]
        return torch.from_numpy(array.view(bits)).view(own)
    return torch.from_numpy(array)
