"""clamp, and the gradient of equal operands, which torch 2.14 shares between them."""

from typing import Any

import jax
import jax.numpy as jnp
import torch

from torch_bridge.lowering.dtypes import cast, is_float, result_type
from torch_bridge.lowering.table import lowering

SHARES_TIES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)


def of_equals(result, x, y):
    """Return fmax's or fmin's result with this torch's gradient: of equal operands the first has it, or each half."""
    return jnp.where(x == y, x / 2 + y / 2, result) if SHARES_TIES and is_float(result) else result


@lowering("clamp.default", "clamp.Tensor", "clamp_min.default", "clamp_max.default", "clamp_min.Tensor")
def clamp(call, x, min=None, max=None):
    """Clamp with torch's gradient: it passes where x lies on a bound, and none reaches the lower of two equal bounds.

    Since torch 2.14 none passes where x lies on a bound that is a number, and half of it on one that is a tensor.
    """
    bounds = [bound for bound in (min, max) if bound is not None]
    dtype = result_type(x, *bounds)
    x = cast(x, dtype)
    low: Any = None if min is None else cast(min, dtype)
    high: Any = None if max is None else cast(max, dtype)
    if is_float(x):
        x = jnp.where(x == x, x, jax.lax.stop_gradient(x))  # a NaN lies within no bounds
    if SHARES_TIES and is_float(x):
        return _clamp_sharing_ties(x, low, high, any(hasattr(bound, "shape") for bound in bounds))
    if low is not None:
        if high is not None:
            low = jnp.where(low < high, low, jax.lax.stop_gradient(low))
        x = jnp.where(x < low, low, x)
    if high is not None:
        x = jnp.where(x > high, high, x)
    return x


def _clamp_sharing_ties(x, low: Any, high: Any, tensors: bool):
    """Clamp with the gradients of torch 2.14. tensors: the bounds are tensors, and get gradients too."""
    inside = jax.lax.stop_gradient
    result = x if low is None else jnp.where(x < low, low, x)
    result = result if high is None else jnp.where(result > high, high, result)
    if not tensors:
        on_bound = jnp.zeros_like(result, dtype=bool)
        for bound in (low, high):
            on_bound |= False if bound is None else x == bound
        return jnp.where(on_bound, inside(result), result)
    ordered = low is None or high is None or low < high
    for bound in (low, high):
        if bound is not None:
            result = jnp.where((x == bound) & ordered, x / 2 + bound / 2, result)
    return result if low is None or high is None else jnp.where((x == low) & (x == high), x, result)


@lowering("clamp_max.default", "clamp_max.Tensor")
def clamp_max(call, x, max):
    return clamp(call, x, None, max)
