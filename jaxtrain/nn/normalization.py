"""Normalisation layers with torch's epsilons. Statistics are computed at least in float32 for every input dtype."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.nn.scopes import named
from torch_bridge.layouts import Buffer


class LayerNorm(nnx.Module):
    """Normalises over the last axis. weight, bias: [width]. eps 1e-5 as in torch (flax: 1e-6). Source:
    torch.nn.LayerNorm."""

    def __init__(self, width: int, eps: float = 1e-5, bias: bool = True, affine: bool = True):
        self.weight = nnx.Param(jnp.ones(width)) if affine else None
        self.bias = nnx.Param(jnp.zeros(width)) if affine and bias else None
        self.eps = eps

    @named
    def __call__(self, x, rngs=None):
        return _affine(_normal(_wide(x), self.eps, True), self.weight, self.bias).astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis. Source: Zhang & Sennrich 2019; torch.nn.RMSNorm."""

    def __init__(self, width: int, eps: float = 1e-6):
        self.weight = nnx.Param(jnp.ones(width))
        self.eps = eps

    @named
    def __call__(self, x, rngs=None):
        return _affine(_normal(_wide(x), self.eps, False), self.weight, None).astype(x.dtype)


class GroupNorm(nnx.Module):
    """Normalises over groups of channels of [batch, channel, *space]. Source: torch.nn.GroupNorm."""

    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5):
        self.weight = nnx.Param(jnp.ones(num_channels))
        self.bias = nnx.Param(jnp.zeros(num_channels))
        self.num_groups = num_groups
        self.eps = eps

    @named
    def __call__(self, x, rngs=None):
        y = _normal(_wide(x).reshape(x.shape[0], self.num_groups, -1), self.eps, True)
        return _affine(y.reshape(x.shape), self.weight, self.bias, axis=1).astype(x.dtype)


class BatchNorm(nnx.Module):
    """Normalises each channel (axis 1) over the batch and all other axes. Source: torch.nn.BatchNorm1d/2d/3d.

    x: [batch, channel, *space]. Training (`rngs` given) uses the statistics of the global batch, on any number of
    devices, and updates `running_mean`/`running_var` (unbiased) with `momentum`; evaluation uses the running ones.
    valid: bool [batch], False excludes a padded row from the statistics; a batch without a valid row updates nothing.
    groups: normalise this many consecutive parts of the batch separately, as torch's DistributedDataParallel without
    SyncBatchNorm does on as many devices; the running statistics are then updated with the mean over the groups.
    Computes in float64 if JAX has it enabled.
    """

    def __init__(self, width: int, eps: float = 1e-5, momentum: float = 0.1, groups: int = 1):
        self.weight = nnx.Param(jnp.ones(width))
        self.bias = nnx.Param(jnp.zeros(width))
        self.running_mean = Buffer(jnp.zeros(width))
        self.running_var = Buffer(jnp.ones(width))
        self.num_batches_tracked = Buffer(jnp.zeros((), jnp.int32))
        self.eps = eps
        self.momentum = momentum
        self.groups = groups

    @named
    def __call__(self, x, rngs=None, valid=None):
        y = x.astype(_widest())
        shape = (1, -1) + (1,) * (x.ndim - 2)
        if rngs is None:
            mean, var = self.running_mean[...], self.running_var[...]
            y = (y - mean.reshape(shape)) * jax.lax.rsqrt(var.reshape(shape) + self.eps)
        else:
            y = self._normalize(y.reshape(self.groups, -1, *x.shape[1:]), valid).reshape(x.shape)
        return _affine(y, self.weight, self.bias, axis=1).astype(x.dtype)

    def _normalize(self, y, valid):
        """Normalise y, float32 [group, batch, channel, *space], with the statistics of each group."""
        axes = (1, *range(3, y.ndim))
        counted = jnp.ones((), bool) if valid is None else valid.reshape(*y.shape[:2], *(1,) * (y.ndim - 2))
        size = math.prod(y.shape[axis] for axis in axes)
        space = size // y.shape[1]
        count = jnp.asarray(size, y.dtype) if valid is None else counted.sum(axes).astype(y.dtype) * space  # [group, 1]
        average = lambda z: jnp.where(counted, z, 0).sum(axes, keepdims=True) / shaped(jnp.maximum(count, 1))
        shaped = lambda n: n.reshape(n.shape + (1,) * (y.ndim - n.ndim)) if n.ndim else n
        mean = average(y)
        centred = y - mean
        var = average(jnp.square(centred))
        self._track(mean.reshape(self.groups, -1), var.reshape(self.groups, -1), count)
        return centred * jax.lax.rsqrt(var + self.eps)

    def _track(self, mean, var, count):
        """Update the running statistics. mean, var: [group, channel]; count: number of values, scalar or [group, 1]."""
        mean, var = jax.lax.stop_gradient((mean, var * count / jnp.maximum(count - 1, 1)))
        filled = jnp.broadcast_to(count > 0, (self.groups, 1))
        share = filled / jnp.maximum(filled.sum(), 1)
        for running, value in ((self.running_mean, mean), (self.running_var, var)):
            moved = (1 - self.momentum) * running[...] + self.momentum * (share * value).sum(0)
            running.set_value(jnp.where(filled.any(), moved, running[...]).astype(jnp.float32))
        self.num_batches_tracked.set_value(self.num_batches_tracked[...] + filled.any().astype(jnp.int32))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _normal(x, eps: float, centred: bool):
    """Return x scaled to a mean square of 1 along its last axis and, if `centred`, shifted to a mean of 0 before."""
    return _normal_and_rate(x, eps, centred)[0]


@_normal.defjvp
def _normal_jvp(eps, centred, primals, tangents):
    """Compute the derivative from the result; differentiating mean and variance needs more passes over activations."""
    (x,), (moved,) = primals, tangents
    normal, rate = _normal_and_rate(x, eps, centred)
    along = normal * (normal * moved).mean(-1, keepdims=True)
    return normal, rate * ((moved - moved.mean(-1, keepdims=True) if centred else moved) - along)


def _normal_and_rate(x, eps, centred):
    x = x - x.mean(-1, keepdims=True) if centred else x
    rate = jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps)
    return x * rate, rate


def _wide(x):
    """Convert to at least float32, because half precision is too coarse for statistics; float64 stays."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _widest():
    return jnp.result_type(float)  # float32, or float64 where jax_enable_x64 is set


def _affine(y, weight, bias, axis: int = -1):
    shape = [1] * y.ndim
    shape[axis] = -1
    if weight is not None:
        y = y * weight[...].reshape(shape).astype(y.dtype)
    return y if bias is None else y + bias[...].reshape(shape).astype(y.dtype)
