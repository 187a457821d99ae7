"""Normalisations, with their statistics in float32 for every input dtype."""

import math

import jax
import jax.numpy as jnp

from torch_bridge.lowering.dtypes import wide
from torch_bridge.lowering.table import lowering


def _standardise(y, axes, eps):
    y = y - jnp.mean(y, axes, keepdims=True)
    return y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axes, keepdims=True) + eps)


def _affine(y, weight, bias, shape=None):
    if weight is not None:
        y = y * (weight if shape is None else weight.reshape(shape)).astype(y.dtype)
    if bias is not None:
        y = y + (bias if shape is None else bias.reshape(shape)).astype(y.dtype)
    return y


def _channels(x) -> tuple[int, ...]:
    return (1, -1) + (1,) * (x.ndim - 2)


@lowering("layer_norm.default")
def layer_norm(call, x, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
    axes = tuple(range(-len(normalized_shape), 0))
    return _affine(_standardise(wide(x), axes, eps), weight, bias).astype(x.dtype)


@lowering("native_layer_norm.default")
def native_layer_norm(call, x, normalized_shape, weight, bias, eps):
    axes = tuple(range(-len(normalized_shape), 0))
    y = wide(x)
    mean = jnp.mean(y, axes, keepdims=True)
    deviation = jax.lax.rsqrt(jnp.var(y, axes, keepdims=True) + eps)
    return layer_norm(call, x, normalized_shape, weight, bias, eps), mean, deviation


@lowering("rms_norm.default")
def rms_norm(call, x, normalized_shape, weight=None, eps=None):
    axes = tuple(range(-len(normalized_shape), 0))
    eps = float(jnp.finfo(x.dtype).eps) if eps is None else eps
    y = wide(x)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axes, keepdims=True) + eps)
    return _affine(y, weight, None).astype(x.dtype)


@lowering("group_norm.default")
def group_norm(call, x, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True):
    y = wide(x).reshape(x.shape[0], num_groups, math.prod(x.shape[1:]) // num_groups)
    y = _standardise(y, (2,), eps).reshape(x.shape)
    return _affine(y, weight, bias, _channels(x)).astype(x.dtype)


@lowering("native_group_norm.default")
def native_group_norm(call, x, weight, bias, batch, channels, space, groups, eps):
    y = wide(x).reshape(batch, groups, -1)
    mean, deviation = jnp.mean(y, 2), jax.lax.rsqrt(jnp.var(y, 2) + eps)
    return group_norm(call, x, groups, weight, bias, eps), mean, deviation


def _row_weights(call, x):
    """Return 1 for real rows and 0 for padding, [rows, 1, ...]; None if all rows count.

    A leading axis of k * batch holds each sample's k entries together (images cut into windows, flattened tokens).
    """
    if call.valid is None or x.shape[0] % call.valid.shape[0]:
        return None
    rows = jnp.repeat(call.valid, x.shape[0] // call.valid.shape[0])
    return rows.astype(jnp.float32).reshape((-1,) + (1,) * (x.ndim - 1))


def _batch_statistics(call, x):
    """Return mean, biased variance and count per channel, over real rows only."""
    y = wide(x)
    axes = (0, *range(2, x.ndim))
    rows = _row_weights(call, x)
    if rows is None:
        return jnp.mean(y, axes), jnp.var(y, axes), y.size // max(y.shape[1], 1)
    count = jnp.sum(rows) * (y.size // (x.shape[0] * x.shape[1]))
    divisor = jnp.maximum(count, 1)
    mean = jnp.sum(y * rows, axes) / divisor
    centred = y - mean.reshape(_channels(x))
    return mean, jnp.sum(jnp.square(centred) * rows, axes) / divisor, count


def _normalise(x, mean, var, weight, bias, eps):
    shape = _channels(x)
    y = (wide(x) - mean.reshape(shape)) * jax.lax.rsqrt(var.reshape(shape) + eps)
    return _affine(y, weight, bias, shape).astype(x.dtype)


def _moved(running, new, momentum, count):
    """Return the updated running statistics; an empty batch leaves them as they are."""
    new = jax.lax.stop_gradient(new).astype(running.dtype)
    return jnp.where(jnp.asarray(count) > 0, (1 - momentum) * running + momentum * new, running)


@lowering("_native_batch_norm_legit_functional.default")
def batch_norm_functional(call, x, weight, bias, running_mean, running_var, training, momentum, eps):
    """Return the output, mean and 1/deviation for torch's backward pass, and the updated running statistics."""
    if not training:
        y = _normalise(x, running_mean, running_var, weight, bias, eps)
        return y, jnp.zeros(0, x.dtype), jnp.zeros(0, x.dtype), running_mean, running_var
    mean, var, count = _batch_statistics(call, x)
    y = _normalise(x, mean, var, weight, bias, eps)
    unbiased = var * count / jnp.maximum(count - 1, 1)
    new_mean, new_var = _moved(running_mean, mean, momentum, count), _moved(running_var, unbiased, momentum, count)
    return y, mean, jax.lax.rsqrt(var + eps), new_mean, new_var


@lowering("_batch_norm_with_update_functional.default")
def batch_norm_with_update(call, x, weight, bias, running_mean, running_var, momentum, eps):
    """Normalise as in training; also return an empty reserve, for kernels that keep one."""
    y, mean, deviation, *moved = batch_norm_functional(
        call, x, weight, bias, running_mean, running_var, True, momentum, eps
    )
    return y, mean, deviation, jnp.zeros(0, jnp.uint8), *moved


@lowering("_native_batch_norm_legit_no_training.default")
def batch_norm_evaluation(call, x, weight, bias, running_mean, running_var, momentum, eps):
    y = _normalise(x, running_mean, running_var, weight, bias, eps)
    return y, jnp.zeros(0, x.dtype), jnp.zeros(0, x.dtype)


@lowering("_native_batch_norm_legit.no_stats")
def batch_norm_no_stats(call, x, weight, bias, training, momentum, eps):
    mean, var, _ = _batch_statistics(call, x)
    return _normalise(x, mean, var, weight, bias, eps), mean, jax.lax.rsqrt(var + eps)


@lowering("native_batch_norm.default")
def native_batch_norm(call, x, weight, bias, running_mean, running_var, training, momentum, eps):
    if running_mean is None:
        return batch_norm_no_stats(call, x, weight, bias, training, momentum, eps)
    return batch_norm_functional(call, x, weight, bias, running_mean, running_var, training, momentum, eps)[:3]
