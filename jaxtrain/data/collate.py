"""Items -> one batch of numpy arrays, by torch's default rules."""

import functools
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.errors import UserError


def collate(items: Sequence[Any]) -> dict[str, Any]:
    """Stack items into a dict: a mapping keeps its keys, a tuple gets "0", "1", ..., a single array is "0".

    Raises UserError naming the key and the shapes where items do not fit together, or are no numbers.
    """
    first = items[0]
    if isinstance(first, Mapping):
        return {str(key): stack([item[key] for item in items], str(key)) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return {name: stack([item[i] for item in items], name) for i, name in enumerate(first._fields)}
    if isinstance(first, (tuple, list)):
        return {str(i): stack([item[i] for item in items], str(i)) for i in range(len(first))}
    return {"0": stack(items, "0")}


def as_batch(value: Any) -> dict[str, Any]:
    """What a collate function of torch's kind gives -> names and arrays, as `collate` names them."""
    if hasattr(value, "_fields"):
        value = dict(zip(value._fields, value, strict=True))
    elif isinstance(value, (tuple, list)):
        value = dict(enumerate(value))
    elif not isinstance(value, Mapping):
        value = {"0": value}
    return {str(key): _narrow_all(inner, str(key)) for key, inner in value.items()}


def _narrow_all(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _narrow_all(inner, f"{name}.{key}") for key, inner in value.items()}
    if isinstance(value, (tuple, list)) and value and not isinstance(value[0], numbers.Number):
        return tuple(_narrow_all(inner, f"{name}.{i}") for i, inner in enumerate(value))
    array = np.asarray(value)
    if not _is_number(array.dtype):
        raise _no_number(value, name)
    return narrow(array)


def stack(values: Sequence[Any], name: str) -> Any:
    """One array [batch, ...]; nested mappings and sequences stay nested. int64 becomes int32, float64 float32."""
    first = values[0]
    if isinstance(first, Mapping):
        return {str(key): stack([value[key] for value in values], f"{name}.{key}") for key in first}
    if isinstance(first, (tuple, list)) and first and not isinstance(first[0], numbers.Number):
        return tuple(stack([value[i] for value in values], f"{name}.{i}") for i in range(len(first)))
    arrays = [np.asarray(value) for value in values]
    if len({array.shape for array in arrays}) > 1:
        shapes = list(dict.fromkeys(array.shape for array in arrays))
        raise UserError(
            f"the dataset is ragged: `{name}` has shape {list(shapes[0])} in one item and {list(shapes[1])} in "
            "another; pad them in the Dataset, or give the task a collate function"
        )
    odd = {array.dtype for array in arrays if not _is_number(array.dtype)}
    if odd:
        raise _no_number(next(v for v, array in zip(values, arrays, strict=True) if array.dtype in odd), name)
    shape = arrays[0].shape
    if not shape:
        return narrow(np.array(arrays))
    return narrow(np.concatenate(arrays).reshape(len(arrays), *shape))  # np.stack takes longer


def _no_number(value: Any, name: str) -> UserError:
    return UserError(
        f"the dataset returns {type(value).__name__} for `{name}`, wanted numbers, arrays or tensors; convert it in "
        "the Dataset, or give the task a collate function"
    )


@functools.cache
def _is_number(dtype: np.dtype) -> bool:
    return np.issubdtype(dtype, np.number) or dtype in (np.bool_, _BFLOAT16)


def narrow(array: np.ndarray) -> np.ndarray:
    """JAX computes in 32 bits: int64 -> int32, float64 -> float32. Raises UserError where a value does not fit."""
    if array.dtype == np.float64:
        return array.astype(np.float32)
    if array.dtype in (np.int64, np.uint64):
        if array.size and (array.max() > np.iinfo(np.int32).max or array.min() < np.iinfo(np.int32).min):
            raise UserError(f"an integer of the dataset ({array.max()}) does not fit into 32 bits, which JAX counts in")
        return array.astype(np.int32)
    return array


def _bfloat16() -> np.dtype:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


_BFLOAT16 = _bfloat16()
