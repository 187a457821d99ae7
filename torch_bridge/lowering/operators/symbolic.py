"""Operators of a graph that compute no tensors: sizes, checks, and numbers read out of tensors."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from torch_bridge.lowering.table import lowering

# Python's functions of symbolic numbers, for values that the program computes.
ON_ARRAYS: dict[Any, Callable] = {
    torch.sym_max: jnp.maximum,
    torch.sym_min: jnp.minimum,
    torch.sym_not: jnp.logical_not,
    torch.sym_float: lambda x: x.astype(jnp.float32),
    torch.sym_int: lambda x: jnp.trunc(x).astype(jnp.int32),
}


@lowering("sym_size.int")
def sym_size(call, x, dim):
    return x.shape[dim]


@lowering("sym_numel.default")
def sym_numel(call, x):
    return x.size


@lowering("sym_stride.int")
def sym_stride(call, x, dim):
    """Return the stride of a contiguous tensor."""
    step = 1
    for size in x.shape[dim % x.ndim + 1 :]:
        step *= size
    return step


@lowering("sym_storage_offset.default")
def sym_storage_offset(call, x):
    return 0


@lowering("_local_scalar_dense.default", "item.default")
def item(call, x):
    """Return a number read out of a tensor as a 0-d array, without a gradient; a shape cannot depend on it."""
    return jax.lax.stop_gradient(x.reshape(()))


@lowering(
    "_assert_async.msg",
    "_assert_scalar.default",
    "_assert_tensor_metadata.default",
    "sym_constrain_range.default",
    "sym_constrain_range_for_size.default",
)
def no_check(call, *args, **options):
    """Do nothing: the export has proven these checks, or only eager torch can make them."""
