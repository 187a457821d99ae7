"""Operators that work element by element: arithmetic, comparison, functions, activations."""

import math

import jax
import jax.numpy as jnp

from jaxtrain.nn import activations
from torch_bridge.lowering.dtypes import (
    cast,
    category,
    is_float,
    jax_dtype,
    promote,
    promote_float,
    result_type,
)
from torch_bridge.lowering.table import TABLE, lowering

_ANY_DTYPE = {
    "abs": jnp.abs,
    "neg": jnp.negative,
    "sign": jnp.sign,
    "sgn": jnp.sign,
    "square": jnp.square,
    "bitwise_not": jnp.bitwise_not,
    "logical_not": lambda x: x == 0,
    "isnan": lambda x: x != x,
    "ceil": lambda x: jnp.ceil(x) if is_float(x) else x,
    "floor": lambda x: jnp.floor(x) if is_float(x) else x,
    "trunc": lambda x: jnp.trunc(x) if is_float(x) else x,
    "frac": lambda x: x - jnp.trunc(x),
    "positive": lambda x: x,
    "real": jnp.real,
    "imag": jnp.imag,
    "relu": jax.nn.relu,
    "relu6": lambda x: _between(x, 0, 6),
    "isfinite": lambda x: jnp.isfinite(x) if category(x.dtype) > 1 else jnp.ones(x.shape, bool),
    "isinf": lambda x: jnp.isinf(x) if category(x.dtype) > 1 else jnp.zeros(x.shape, bool),
    "signbit": lambda x: jnp.signbit(x) if is_float(x) else x < 0,
}

_FLOAT = {
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "log": jnp.log,
    "log2": jnp.log2,
    "log10": jnp.log10,
    "log1p": jnp.log1p,
    "sqrt": jnp.sqrt,
    "rsqrt": jax.lax.rsqrt,
    "reciprocal": jnp.reciprocal,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tan": jnp.tan,
    "asin": jnp.arcsin,
    "acos": jnp.arccos,
    "atan": jnp.arctan,
    "sinh": jnp.sinh,
    "cosh": jnp.cosh,
    "tanh": jnp.tanh,
    "asinh": jnp.arcsinh,
    "acosh": jnp.arccosh,
    "atanh": jnp.arctanh,
    "erf": jax.scipy.special.erf,
    "erfc": jax.scipy.special.erfc,
    "erfinv": jax.scipy.special.erfinv,
    "i0": jax.scipy.special.i0,
    "special_i0e": jax.scipy.special.i0e,
    "special_i1": jax.scipy.special.i1,
    "special_i1e": jax.scipy.special.i1e,
    "special_ndtri": jax.scipy.special.ndtri,
    "lgamma": jax.scipy.special.gammaln,
    "digamma": jax.scipy.special.digamma,
    "sigmoid": jax.nn.sigmoid,
    "sinc": jnp.sinc,
    "log_sigmoid": jax.nn.log_sigmoid,
    "silu": jax.nn.silu,
    "mish": lambda x: x * jnp.tanh(jax.nn.softplus(x)),
}


def _unary(function, widen: bool):
    return lambda call, x: function(*promote_float(x)) if widen else function(x)


for _name, _function in _ANY_DTYPE.items():
    TABLE[f"aten.{_name}.default"] = _unary(_function, False)
for _name, _function in _FLOAT.items():
    TABLE[f"aten.{_name}.default"] = _unary(_function, True)

_COMPARISONS = {
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
}
_BINARY = {
    "bitwise_and": jnp.bitwise_and,
    "bitwise_or": jnp.bitwise_or,
    "bitwise_xor": jnp.bitwise_xor,
    "bitwise_left_shift": jnp.left_shift,
    "bitwise_right_shift": jnp.right_shift,
    "fmod": jnp.fmod,
    "remainder": jnp.remainder,
}


def _binary(function):
    return lambda call, x, y: function(*promote(x, y))


for _name, _function in (_COMPARISONS | _BINARY).items():
    for _overload in ("Tensor", "Scalar"):
        TABLE[f"aten.{_name}.{_overload}"] = _binary(_function)
for _name in ("bitwise_and", "bitwise_or", "bitwise_xor", "remainder"):
    TABLE[f"aten.{_name}.Scalar_Tensor"] = _binary(_BINARY[_name])
for _name in ("bitwise_left_shift", "bitwise_right_shift"):
    TABLE[f"aten.{_name}.Tensor_Scalar"] = TABLE.pop(f"aten.{_name}.Scalar")

_PAIRS = {
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "fmax": jnp.fmax,
    "fmin": jnp.fmin,
    "gcd": jnp.gcd,
    "lcm": jnp.lcm,
    "nextafter": jnp.nextafter,
    "igamma": jax.scipy.special.gammainc,
    "igammac": jax.scipy.special.gammaincc,
}
for _name, _function in {"lshift": jnp.left_shift, "rshift": jnp.right_shift}.items():
    for _overload in ("Tensor", "Scalar"):
        TABLE[f"aten.__{_name}__.{_overload}"] = _binary(_function)
for _name, _function in _PAIRS.items():
    TABLE[f"aten.{_name}.default"] = _binary(_function)

for _name, _function in {"and": jnp.logical_and, "or": jnp.logical_or, "xor": jnp.logical_xor}.items():
    TABLE[f"aten.logical_{_name}.default"] = lambda call, x, y, function=_function: function(x != 0, y != 0)


@lowering("add.Tensor", "add.Scalar")
def add(call, x, y, alpha=1):
    dtype = result_type(x, y)
    x, y = cast(x, dtype), cast(y, dtype)
    return x + (y if alpha == 1 else cast(alpha, dtype) * y)


@lowering("sub.Tensor", "sub.Scalar")
def sub(call, x, y, alpha=1):
    dtype = result_type(x, y)
    x, y = cast(x, dtype), cast(y, dtype)
    return x - (y if alpha == 1 else cast(alpha, dtype) * y)


@lowering("rsub.Tensor", "rsub.Scalar")
def rsub(call, x, y, alpha=1):
    return sub(call, y, x, alpha) if hasattr(y, "dtype") else sub(call, jnp.asarray(y, result_type(x, y)), x, alpha)


@lowering("mul.Tensor", "mul.Scalar")
def mul(call, x, y):
    x, y = promote(x, y)
    return x * y


@lowering("div.Tensor", "div.Scalar")
def div(call, x, y):
    x, y = promote_float(x, y)
    return x / y


@lowering("div.Tensor_mode", "div.Scalar_mode")
def div_mode(call, x, y, rounding_mode=None):
    if rounding_mode is None:
        return div(call, x, y)
    x, y = promote(x, y)
    if rounding_mode == "floor":
        return jnp.floor_divide(x, y)
    return jnp.trunc(x / y) if is_float(x) else jax.lax.div(*jnp.broadcast_arrays(x, y))


@lowering("floor_divide.default", "floor_divide.Scalar")
def floor_divide(call, x, y):
    return jnp.floor_divide(*promote(x, y))


@lowering("pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar")
def power(call, x, y):
    dtype = result_type(x, y)
    if not hasattr(y, "dtype") and float(y) == int(y) and abs(y) <= 64 and (category(dtype) > 1 or y >= 0):
        return cast(x, dtype) ** int(y)  # a product, with a gradient at zero
    return jnp.power(cast(x, dtype), cast(y, dtype))


@lowering("atan2.default")
def atan2(call, y, x):
    return jnp.arctan2(*promote_float(y, x))


@lowering("hypot.default")
def hypot(call, x, y):
    return jnp.hypot(*promote(x, y))


@lowering("copysign.Tensor", "copysign.Scalar")
def copysign(call, x, y):
    return jnp.copysign(*promote_float(x, y))


@lowering("logaddexp.default")
def logaddexp(call, x, y):
    return jnp.logaddexp(*promote(x, y))


@lowering("xlogy.Tensor", "xlogy.Scalar_Other", "xlogy.Scalar_Self")
def xlogy(call, x, y):
    return jax.scipy.special.xlogy(*promote_float(x, y))


@lowering("lerp.Tensor", "lerp.Scalar")
def lerp(call, start, end, weight):
    return start + cast(weight, start.dtype) * (end - start)


@lowering("addcmul.default")
def addcmul(call, x, first, second, value=1):
    x, first, second = promote(x, first, second)
    return x + cast(value, x.dtype) * first * second


@lowering("addcdiv.default")
def addcdiv(call, x, first, second, value=1):
    x, first, second = promote(x, first, second)
    return x + cast(value, x.dtype) * first / second


@lowering("round.default", "round.decimals")
def round_(call, x, decimals=0):
    return jnp.round(x, decimals) if is_float(x) else x


@lowering("clamp.default", "clamp.Tensor", "clamp_min.default", "clamp_max.default", "clamp_min.Tensor")
def clamp(call, x, min=None, max=None):
    """The gradient passes where x lies on a bound, as in torch."""
    bounds = [bound for bound in (min, max) if bound is not None]
    dtype = result_type(x, *bounds)
    x = cast(x, dtype)
    if min is not None:
        low = cast(min, dtype)
        x = jnp.where(x < low, low, x)
    if max is not None:
        high = cast(max, dtype)
        x = jnp.where(x > high, high, x)
    return x


@lowering("clamp_max.default", "clamp_max.Tensor")
def clamp_max(call, x, max):
    return clamp(call, x, None, max)


@lowering("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def where(call, condition, x, y):
    dtype = result_type(x, y)
    return jnp.where(condition, cast(x, dtype), cast(y, dtype))


@lowering("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(call, x, mask, value):
    return jnp.where(mask, cast(value, x.dtype), x)


@lowering("nan_to_num.default")
def nan_to_num(call, x, nan=None, posinf=None, neginf=None):
    return jnp.nan_to_num(x, nan=0.0 if nan is None else nan, posinf=posinf, neginf=neginf) if is_float(x) else x


@lowering("_to_copy.default")
def to_copy(call, x, *, dtype=None, **placement):
    return x if dtype is None else cast(x, jax_dtype(dtype))


@lowering("type_as.default")
def type_as(call, x, other):
    return cast(x, other.dtype)


@lowering("clone.default", "alias.default", "lift_fresh_copy.default", "resolve_conj.default", "resolve_neg.default")
def clone(call, x, **memory):
    return x


@lowering("_conj.default", "conj_physical.default")
def conj(call, x):
    return jnp.conj(x)


@lowering("copy.default")
def copy(call, x, source, non_blocking=False):
    return jnp.broadcast_to(cast(source, x.dtype), x.shape)


@lowering("detach.default")
def detach(call, x):
    return jax.lax.stop_gradient(x)


@lowering("torch_bridge.rewritten.default")
def rewritten(call, value, before):
    """A value that was written without autograd's knowledge: its gradient is that of what was there before."""
    return _rewritten(value, cast(before, value.dtype))


@jax.custom_jvp
def _rewritten(value, before):
    return value


_rewritten.defjvp(lambda values, tangents: (values[0], tangents[1]))


@lowering("complex.default")
def complex_(call, real, imag):
    return jax.lax.complex(*jnp.broadcast_arrays(real, imag))


@lowering("polar.default")
def polar(call, radius, angle):
    return jax.lax.complex(radius * jnp.cos(angle), radius * jnp.sin(angle))


@lowering("angle.default")
def angle(call, x):
    return jnp.angle(x)


@lowering("view_as_real.default", "view_as_real_copy.default")
def view_as_real(call, x):
    return jnp.stack([x.real, x.imag], axis=-1)


@lowering("view_as_complex.default", "view_as_complex_copy.default")
def view_as_complex(call, x):
    return jax.lax.complex(x[..., 0], x[..., 1])


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
    return jnp.where(x > lambd, x - lambd, jnp.where(x < -lambd, x + lambd, 0)).astype(x.dtype)


@lowering("hardshrink.default")
def hardshrink(call, x, lambd=0.5):
    return jnp.where(jnp.abs(x) > lambd, x, 0).astype(x.dtype)


@lowering("hardtanh.default")
def hardtanh(call, x, min_val=-1, max_val=1):
    return _between(x, min_val, max_val)


def _between(x, low, high) -> jax.Array:
    return jnp.where(x <= low, cast(low, x.dtype), jnp.where(x >= high, cast(high, x.dtype), x))


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


@lowering("polygamma.default")
def polygamma(call, order, x):
    (x,) = promote_float(x)
    return jax.scipy.special.polygamma(order, x)


@lowering("special_zeta.default")
def zeta(call, x, q):
    return jax.scipy.special.zeta(*promote_float(x, q))


@lowering("ldexp.Tensor")
def ldexp(call, x, power):
    x, power = promote_float(x, power)
    return x * jnp.exp2(power)


@lowering("frexp.Tensor")
def frexp(call, x):
    return tuple(jnp.frexp(x))


@lowering("special_erfcx.default")
def erfcx(call, x):
    """exp(x^2) erfc(x); above 5 by its asymptotic series, where the factors leave float32."""
    (x,) = promote_float(x)
    small = jnp.minimum(x, 5)
    large = jnp.maximum(x, 5)
    y = 1 / (2 * large * large)
    series = (1 - y * (1 - 3 * y * (1 - 5 * y * (1 - 7 * y)))) / (large * math.sqrt(math.pi))
    return jnp.where(x > 5, series, jnp.exp(small * small) * jax.scipy.special.erfc(small))
