"""Activations."""

import jax
import jax.numpy as jnp

from jaxtrain.nn import activations
from torch_bridge.lowering.dtypes import cast
from torch_bridge.lowering.operators.derivatives import sloped
from torch_bridge.lowering.table import lowering


@lowering("gelu.default")
def gelu(call, x, approximate="none"):
    if approximate == "tanh":
        return jax.nn.gelu(x, approximate=True)
    return activations.gelu(x)


@lowering("leaky_relu.default")
def leaky_relu(call, x, negative_slope=0.01):
    return jnp.where(x > 0, x, x * negative_slope)


@lowering("elu.default")
def elu(call, x, alpha=1, scale=1, input_scale=1):
    negative = jnp.expm1(jnp.where(x > 0, 0, x) * input_scale) * alpha
    return jnp.where(x > 0, x, negative).astype(x.dtype) * scale


@lowering("celu.default")
def celu(call, x, alpha=1.0):
    return jnp.where(x > 0, x, alpha * jnp.expm1(jnp.where(x > 0, 0, x) / alpha))


@lowering("selu.default")
def selu(call, x):
    return jax.nn.selu(x)


@lowering("softplus.default")
def softplus(call, x, beta=1, threshold=20):
    scaled = x * beta
    return jnp.where(scaled > threshold, x, jax.nn.softplus(scaled) / beta)


@lowering("softshrink.default")
def softshrink(call, x, lambd=0.5):
    value = jnp.where(x > lambd, x - lambd, jnp.where(x < -lambd, x + lambd, x * 0)).astype(x.dtype)
    return sloped(jax.lax.stop_gradient(value), (x, 1 - ((x >= -lambd) & (x <= lambd)).astype(x.dtype)))


@lowering("hardshrink.default")
def hardshrink(call, x, lambd=0.5):
    return jnp.where(jnp.abs(x) > lambd, x, 0).astype(x.dtype)


@lowering("hardtanh.default")
def hardtanh(call, x, min_val=-1, max_val=1) -> jax.Array:
    return jnp.where(x <= min_val, cast(min_val, x.dtype), jnp.where(x >= max_val, cast(max_val, x.dtype), x))


@lowering("hardsigmoid.default")
def hardsigmoid(call, x):
    return jnp.where(x <= -3, 0, jnp.where(x >= 3, 1, x / 6 + 0.5)).astype(x.dtype)


@lowering("hardswish.default")
def hardswish(call, x):
    return jnp.where(x <= -3, 0, jnp.where(x >= 3, x, x * (x / 6 + 0.5))).astype(x.dtype)


@lowering("threshold.default")
def threshold(call, x, threshold, value):
    return jnp.where(x <= threshold, cast(value, x.dtype), x)


@lowering("prelu.default", "_prelu_kernel.default")
def prelu(call, x, weight):
    if weight.ndim == 1 and x.ndim > 1:
        weight = weight.reshape((-1,) + (1,) * (x.ndim - 2))
    return jnp.where(x > 0, x, weight * x)


@lowering("glu.default")
def glu(call, x, dim=-1):
    value, gate = jnp.split(x, 2, axis=dim)
    return value * jax.nn.sigmoid(gate)


@lowering("relu6.default")
def relu6(call, x):
    return hardtanh(call, x, 0, 6)
