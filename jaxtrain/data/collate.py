"""Items -> one batch of numpy arrays, by torch's default rules."""

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


def stack(values: Sequence[Any], name: str) -> Any:
    """One array [batch, ...]; nested mappings and sequences stay nested. int64 becomes int32, float64 float32."""
    first = values[0]
    if isinstance(first, Mapping):
        return {str(key): stack([value[key] for value in values], f"{name}.{key}") for key in first}
    if isinstance(first, (tuple, list)) and first and not isinstance(first[0], numbers.Number):
        return tuple(stack([value[i] for value in values], f"{name}.{i}") for i in range(len(first)))
    arrays = [np.asarray(value) for value in values]
    for array in arrays:
        if array.shape != arrays[0].shape:
            raise UserError(
                f"the dataset is ragged: `{name}` has shape {list(arrays[0].shape)} in one item and "
                f"{list(array.shape)} in another; pad them in the Dataset, or give the task a collate function"
            )
    odd = next((v for v, array in zip(values, arrays, strict=True) if not _is_number(array.dtype)), None)
    if odd is not None:
        raise UserError(
            f"the dataset returns {type(odd).__name__} for `{name}`, wanted numbers, arrays or tensors; "
            "convert it in the Dataset, or give the task a collate function"
        )
    return narrow(np.stack(arrays))


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
