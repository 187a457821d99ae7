"""Number types as torch means them, in the widths that JAX has: int64 counts as int32, float64 as float32."""

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_NAMES = {  # torch's name -> numpy's, where they differ
    "bool": "bool_",
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "cfloat": "complex64",
    "cdouble": "complex128",
    "short": "int16",
    "int": "int32",
    "long": "int64",
}


def jax_dtype(dtype: Any) -> np.dtype:
    """torch.int64 -> int32 (JAX's width), torch.bfloat16 -> bfloat16; numpy dtypes pass."""
    name = str(dtype)
    if name.startswith("torch."):
        name = name.removeprefix("torch.")
        dtype = _NAMES.get(name, name)
    return jax.dtypes.canonicalize_dtype(jnp.dtype(dtype))


def known_dtype(dtype: Any) -> bool:
    """Return True if JAX has this dtype; it has no complex32 and no quantized ones."""
    try:
        return category(jax_dtype(dtype)) < 3 or jnp.issubdtype(jax_dtype(dtype), jnp.complexfloating)
    except TypeError:
        return False


def is_float(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jnp.floating)


def real_dtype(x: Any) -> np.dtype:
    """The dtype of a number's real part."""
    return x.real.dtype if category(x.dtype) == 3 else x.dtype


def whole_dtype(x: Any) -> np.dtype:
    """The dtype of sums of integers: int32, int64 where x has it already."""
    return jnp.dtype("int64" if x.dtype == np.int64 else "int32")


def category(dtype: np.dtype) -> int:
    """0 bool, 1 integer, 2 floating, 3 complex: torch promotes across these before widths."""
    if dtype == jnp.bool_:
        return 0
    if jnp.issubdtype(dtype, jnp.integer):
        return 1
    return 2 if jnp.issubdtype(dtype, jnp.floating) else 3


def _scalar_dtype(value: Any) -> np.dtype:
    if isinstance(value, bool):
        return jnp.dtype(bool)
    if isinstance(value, int):
        return jnp.dtype("int32")
    return jnp.dtype("complex64" if isinstance(value, complex) else "float32")


def result_type(*values: Any) -> np.dtype:
    """The dtype of torch's arithmetic on arrays and Python numbers.

    Arrays with axes decide; 0-d arrays and, last, Python numbers only lift the category (int -> float).
    Source: torch.result_type.
    """
    arrays = [value for value in values if hasattr(value, "dtype")]
    groups = (
        [value.dtype for value in arrays if value.ndim],
        [value.dtype for value in arrays if not value.ndim],
        [_scalar_dtype(value) for value in values if not hasattr(value, "dtype")],
    )
    result = None
    for group in groups:
        if group:
            dtype = reduce(jnp.promote_types, group)
            if result is None:
                result = dtype
            elif category(dtype) > category(result):
                result = jnp.promote_types(result, dtype)
    assert result is not None
    return result


def cast(value: Any, dtype: np.dtype):
    """The value as an array of `dtype`; numbers beyond its range become its ends, NaN and infinities stay."""
    if hasattr(value, "dtype"):
        return value if value.dtype == dtype else convert(value, dtype)
    return jnp.asarray(within(value, dtype), dtype)


def convert(value: Any, dtype: np.dtype):
    """torch's `to`: floats to integers truncate, complex to real drops the imaginary part, anything to bool is != 0.
    Floats beyond a byte or a short keep their lowest bits, where JAX gives the largest number; those beyond int64 and
    NaN become its least number."""
    if dtype == jnp.bool_:
        return value != 0
    if category(value.dtype) == 3 and category(dtype) < 3:
        value = value.real
    if category(dtype) == 1 and np.dtype(dtype).itemsize < 4 and category(value.dtype) == 2:
        value = jnp.where(jnp.abs(value) < 2.0**31, value, 0).astype(jnp.int32)
    if dtype == np.int64 and category(value.dtype) == 2:
        value = jnp.where(jnp.abs(value) < 2.0**63, value, -(2.0**63))
    return value.astype(dtype)


def within(value: Any, dtype: np.dtype):
    """A Python number, limited to what `dtype` holds (torch.finfo(float32).min is not a float16)."""
    kind = category(dtype)
    if kind == 1:
        limits = jnp.iinfo(dtype)
        return min(max(int(value), int(limits.min)), int(limits.max))
    if kind == 2 and np.isfinite(value):
        limits = jnp.finfo(dtype)
        return min(max(float(value), float(limits.min)), float(limits.max))
    return value


def promote(*values: Any) -> list:
    """The values as arrays of their common dtype."""
    dtype = result_type(*values)
    return [cast(value, dtype) for value in values]


def promote_float(*values: Any) -> list:
    """As promote, integers and bools as float32."""
    dtype = float_type(*values)
    return [cast(value, dtype) for value in values]


def float_type(*values: Any) -> np.dtype:
    """result_type, float32 of integers and bools."""
    dtype = result_type(*values)
    return jnp.dtype("float32") if category(dtype) < 2 else dtype


def match_products(*values: Any) -> list:
    """Operands of a matrix product or convolution in the narrowest floating type among them.

    Exported graphs carry float32 constants and casts even where the weights are bfloat16; products then run as under
    torch.autocast.
    """
    dtypes = [value.dtype for value in values if value is not None]
    if len(set(dtypes)) == 1 or not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        return list(values)
    narrow = min(dtypes, key=lambda dtype: dtype.itemsize)
    return [None if value is None else value.astype(narrow) for value in values]


def wide_dtype(dtype: np.dtype) -> np.dtype:
    """float32 for float16 and bfloat16."""
    return jnp.dtype("float32") if category(dtype) == 2 and dtype.itemsize < 4 else dtype


def wide(x):
    """float32 for a sum that float16 or bfloat16 would spoil."""
    return x.astype(jnp.float32) if is_float(x) and x.dtype.itemsize < 4 else x
