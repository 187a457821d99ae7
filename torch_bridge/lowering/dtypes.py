"""Map torch dtypes to the widths that JAX has (int64 to int32, float64 to float32), and promote as torch does."""

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
    """Return JAX's dtype for a torch or numpy dtype: torch.int64 -> int32 (JAX's width), torch.bfloat16 -> bfloat16."""
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
    """Return the dtype of x's real part: float32 for complex64, x's own dtype for real numbers."""
    return x.real.dtype if category(x.dtype) == 3 else x.dtype


def whole_dtype(x: Any) -> np.dtype:
    """Return the dtype for sums of integers: int64 if x is int64 already, else int32."""
    return jnp.dtype("int64" if x.dtype == np.int64 else "int32")


def category(dtype: np.dtype) -> int:
    """Return 0 for bool, 1 integer, 2 floating, 3 complex: torch promotes across these before widths."""
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
    """Return the dtype of torch's arithmetic on arrays and Python numbers.

    Arrays with axes decide; 0-d arrays and, last, Python numbers only raise the category (int -> float). Source:
    torch.result_type.
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
    """Return the value as an array of `dtype`. Python numbers out of range become its limits; NaN and infinities
    stay."""
    if hasattr(value, "dtype"):
        return value if value.dtype == dtype else convert(value, dtype)
    return jnp.asarray(within(value, dtype), dtype)


def convert(value: Any, dtype: np.dtype):
    """Convert an array as torch's `to`: floats to integers truncate, complex to real drops the imaginary part, to bool
    is != 0. Floats beyond a byte or a short keep their lowest bits, where JAX returns the largest number; floats beyond
    int64, and NaN, become its lowest number."""
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
    """Return a Python number limited to the range of `dtype` (torch.finfo(float32).min does not fit a float16)."""
    kind = category(dtype)
    if kind == 1:
        limits = jnp.iinfo(dtype)
        return min(max(int(value), int(limits.min)), int(limits.max))
    if kind == 2 and np.isfinite(value):
        limits = jnp.finfo(dtype)
        return min(max(float(value), float(limits.min)), float(limits.max))
    return value


def promote(*values: Any) -> list:
    """Return the values as arrays of their common dtype."""
    dtype = result_type(*values)
    return [cast(value, dtype) for value in values]


def promote_float(*values: Any) -> list:
    """Return the values as arrays of their common dtype, integers and bools as float32."""
    dtype = float_type(*values)
    return [cast(value, dtype) for value in values]


def float_type(*values: Any) -> np.dtype:
    """Return the values' `result_type`, or float32 if that is integer or bool."""
    dtype = result_type(*values)
    return jnp.dtype("float32") if category(dtype) < 2 else dtype


def match_products(*values: Any) -> list:
    """Cast operands of a matrix product or convolution to the narrowest floating dtype among them.

    Exported graphs hold float32 constants and casts even where the weights are bfloat16; products then run as under
    torch.autocast.
    """
    dtypes = [value.dtype for value in values if value is not None]
    if len(set(dtypes)) == 1 or not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        return list(values)
    narrow = min(dtypes, key=lambda dtype: dtype.itemsize)
    return [None if value is None else value.astype(narrow) for value in values]


def wide_dtype(dtype: np.dtype) -> np.dtype:
    """Return float32 for float16 and bfloat16, any other dtype unchanged."""
    return jnp.dtype("float32") if category(dtype) == 2 and dtype.itemsize < 4 else dtype


def wide(x):
    """Cast float16 and bfloat16 to float32, because sums in them lose precision; return other arrays unchanged."""
    return x.astype(jnp.float32) if is_float(x) and x.dtype.itemsize < 4 else x
