"""Norms and distances, with torch's gradients at zero vectors and corners."""

import jax
import jax.numpy as jnp
import numpy as np

from torch_bridge.lowering.dtypes import jax_dtype, real_dtype, wide
from torch_bridge.lowering.operators.derivatives import along, derived, zero_where
from torch_bridge.lowering.operators.reductions import axes_of
from torch_bridge.lowering.table import lowering


@lowering("linalg_vector_norm.default")
def vector_norm(call, x, ord=2, dim=None, keepdim=False, *, dtype=None):
    """Compute a vector norm; the gradient is torch's at corners and zero vectors too."""
    x = x if dtype is None else x.astype(jax_dtype(dtype))
    axes, size = axes_of(x, dim), real_dtype(x)
    x = wide(x)
    if ord == 0:
        return jnp.sum(x != 0, axes, keepdims=keepdim).astype(size)
    length = jnp.abs(x)
    if ord in (float("inf"), float("-inf")):
        value = (jnp.max if ord > 0 else jnp.min)(length, axes, keepdims=True)
        same = (length == value) | ((length != length) & (value != value))
        direction = jnp.sign(x) * same / jnp.sum(same, axes, keepdims=True)
    elif ord == 1:
        value, direction = jnp.sum(length, axes, keepdims=True), jnp.sign(x)
    else:
        value = _length(jax.lax.stop_gradient(length), ord, axes)
        if ord == 2:
            direction = _divided(x, value)
        elif ord < 1:
            direction = jnp.sign(x) * zero_where(x == 0, length ** (ord - 1)) * value ** (1 - ord)
        else:
            direction = _divided(jnp.sign(x) * length ** (ord - 1), value ** (ord - 1))
    shape = value.shape if keepdim else tuple(n for axis, n in enumerate(value.shape) if axis not in axes)
    rule = lambda direction, move: jnp.sum(along(direction, move), axes).reshape(shape)
    return derived(jax.lax.stop_gradient(value.reshape(shape)), rule, direction, x).astype(size)


def _length(length, ord, axes):
    total = jnp.sum(jnp.square(length) if ord == 2 else length**ord, axes, keepdims=True)
    return jnp.sqrt(total) if ord == 2 else total ** (1 / ord)


def _divided(x, y):
    """Return x / y, and 0 where y is 0."""
    return zero_where(y == 0, x / jnp.where(y == 0, 1, y))


@lowering("norm.Scalar", "norm.ScalarOpt_dim")
def norm(call, x, p=2, dim=None, keepdim=False):
    return vector_norm(call, x, 2 if p is None else p, dim, keepdim)


@lowering("dist.default")
def dist(call, x, y, p=2):
    return vector_norm(call, x - y, p)


@lowering("_cdist_forward.default", "cdist.default")
def cdist(call, x, y, p=2, compute_mode=None):
    """Return distances between rows: x [..., n, width], y [..., m, width] -> [..., n, m]."""
    return _distance(x[..., :, None, :] - y[..., None, :, :], p)


@lowering("_pdist_forward.default")
def pdist(call, x, p=2.0):
    """Return distances between the rows i < j of x [n, width]."""
    first, second = np.triu_indices(x.shape[0], 1)
    return _distance(x[first] - x[second], p)


def _distance(difference, p):
    """Return a norm over the last axis; each of equal largest elements has the whole gradient, as in torch's kernel."""
    if p != float("inf"):
        return vector_norm(None, difference, p, -1)
    length = jnp.abs(jax.lax.stop_gradient(difference))
    value = jnp.max(length, -1) if difference.shape[-1] else jnp.zeros(length.shape[:-1], length.dtype)
    direction = jnp.sign(difference) * (length == value[..., None])
    return derived(value, lambda direction, move: jnp.sum(direction * move, -1), direction, difference)
