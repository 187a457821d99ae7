"""Operators that work element by element: arithmetic, comparison, functions, activations."""

import jax
import jax.numpy as jnp

from torch_bridge.lowering.dtypes import (
    cast,
    category,
    float_type,
    is_float,
    jax_dtype,
    promote,
    promote_float,
    result_type,
    wide,
    wide_dtype,
)
from torch_bridge.lowering.operators.bounds import of_equals
from torch_bridge.lowering.operators.derivatives import absolute, along, derived, sloped, zero_where
from torch_bridge.lowering.operators.gamma_functions import digamma
from torch_bridge.lowering.table import TABLE, lowering


def _direction(x):
    """Compute sgn: x / |x| of complex numbers; 0 at 0, without a gradient."""
    if not jnp.iscomplexobj(x):
        return jnp.sign(x)
    size = absolute(x)
    direction = zero_where(size == 0, x / jnp.where(size == 0, 1, size))

    def rule(factors, move):
        size, direction = factors
        return zero_where(size == 0, (move - direction * along(direction, move)) / jnp.where(size == 0, 1, size))

    return derived(jax.lax.stop_gradient(direction), rule, (size, direction), x)


def _acosh(x):
    """Compute acosh; JAX's complex slope, 1 / sqrt(x^2 - 1), has the wrong sign left of the imaginary axis."""
    if not jnp.iscomplexobj(x):
        return jnp.arccosh(x)
    return sloped(jnp.arccosh(jax.lax.stop_gradient(x)), (x, jax.lax.rsqrt(x - 1) * jax.lax.rsqrt(x + 1)))


_ANY_DTYPE = {
    "abs": absolute,
    "neg": jnp.negative,
    "sign": jnp.sign,
    "sgn": _direction,
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
    "acosh": _acosh,
    "atanh": jnp.arctanh,
    "erf": jax.scipy.special.erf,
    "erfc": jax.scipy.special.erfc,
    "erfinv": jax.scipy.special.erfinv,
    "special_ndtri": jax.scipy.special.ndtri,
    "lgamma": jax.scipy.special.gammaln,
    "digamma": digamma,
    "sigmoid": jax.nn.sigmoid,
    "sinc": jnp.sinc,
    "log_sigmoid": jax.nn.log_sigmoid,
    "silu": jax.nn.silu,
    "mish": lambda x: x * jnp.tanh(jax.nn.softplus(x)),
}


def _nextafter(x, y):
    value = jnp.nextafter(*jax.lax.stop_gradient((x, y)))
    return sloped(value, (x, (x != y).astype(x.dtype)))


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
    "fmax": lambda x, y: of_equals(jnp.where((x >= y) | (y != y), x, y), x, y),
    "fmin": lambda x, y: of_equals(jnp.where((x <= y) | (y != y), x, y), x, y),
    "gcd": jnp.gcd,
    "lcm": jnp.lcm,
    "nextafter": lambda x, y: _nextafter(x, y),
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
    return x + y if alpha == 1 else cast(wide(x) + wide(cast(alpha, dtype)) * wide(y), dtype)


@lowering("sub.Tensor", "sub.Scalar")
def sub(call, x, y, alpha=1):
    dtype = result_type(x, y)
    x, y = cast(x, dtype), cast(y, dtype)
    return x - y if alpha == 1 else cast(wide(x) - wide(cast(alpha, dtype)) * wide(y), dtype)


@lowering("rsub.Tensor", "rsub.Scalar")
def rsub(call, x, y, alpha=1):
    return sub(call, y, x, alpha) if hasattr(y, "dtype") else sub(call, jnp.asarray(y, result_type(x, y)), x, alpha)


@lowering("mul.Tensor", "mul.Scalar")
def mul(call, x, y):
    """Multiply; Python numbers keep digits that a narrow dtype lacks: torch computes in float32 and rounds once."""
    dtype = result_type(x, y)
    inside = dtype if hasattr(x, "dtype") and hasattr(y, "dtype") else wide_dtype(dtype)
    return cast(cast(x, inside) * cast(y, inside), dtype)


@lowering("div.Tensor", "div.Scalar", "true_divide.Tensor", "true_divide.Scalar")
def div(call, x, y):
    dtype = float_type(x, y)
    inside = dtype if hasattr(x, "dtype") and hasattr(y, "dtype") else wide_dtype(dtype)
    return cast(cast(x, inside) / cast(y, inside), dtype)


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
    if isinstance(y, (bool, int, float)) and float(y) == int(y) and abs(y) <= 64 and (category(dtype) > 1 or y >= 0):
        return cast(x, dtype) ** int(y)  # a product, with a gradient at zero
    x, y = cast(x, dtype), cast(y, dtype)
    value = jnp.power(*jax.lax.stop_gradient((x, y)))
    if category(dtype) < 2:
        return value
    falls = zero_where(y == 0, y * jnp.power(x, y - 1))
    grows = zero_where((x == 0) & (jnp.real(y) >= 0), value * jnp.log(x))
    return sloped(value, (x, falls), (y, grows))


@lowering("atan2.default")
def atan2(call, y, x):
    """Compute atan2, with gradient 0 at the origin."""
    y, x = promote_float(y, x)
    size = x * x + y * y
    inverse = zero_where(size == 0, 1 / jnp.where(size == 0, 1, size))
    return sloped(jnp.arctan2(*jax.lax.stop_gradient((y, x))), (y, x * inverse), (x, -y * inverse))


@lowering("hypot.default")
def hypot(call, x, y):
    x, y = promote(x, y)
    value = jnp.hypot(*jax.lax.stop_gradient((x, y)))
    return sloped(value, (x, x / value), (y, y / value))


@lowering("copysign.Tensor", "copysign.Scalar")
def copysign(call, x, y):
    x, y = promote_float(x, y)
    value = jnp.copysign(*jax.lax.stop_gradient((x, y)))
    return sloped(value, (x, zero_where(x == 0, jnp.sign(x) * jnp.sign(value))))


@lowering("logaddexp.default")
def logaddexp(call, x, y):
    x, y = promote(x, y)
    value = jnp.logaddexp(*jax.lax.stop_gradient((x, y)))
    return sloped(value, (x, 1 / (1 + jnp.exp(y - x))), (y, 1 / (1 + jnp.exp(x - y))))


@lowering("xlogy.Tensor", "xlogy.Scalar_Other", "xlogy.Scalar_Self")
def xlogy(call, x, y):
    x, y = promote_float(x, y)
    value = jax.scipy.special.xlogy(*jax.lax.stop_gradient((x, y)))
    return sloped(value, (x, zero_where((x == 0) & (y <= 0), jnp.log(y))), (y, x / y))


@lowering("special_xlog1py.default", "special_xlog1py.other_scalar", "special_xlog1py.self_scalar")
def xlog1py(call, x, y):
    x, y = promote_float(x, y)
    value = jax.scipy.special.xlog1py(*jax.lax.stop_gradient((x, y)))
    return sloped(value, (x, zero_where((x == 0) & (y <= -1), jnp.log1p(y))), (y, x / (y + 1)))


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


@lowering("_conj.default", "conj_physical.default", "_conj_physical.default")
def conj(call, x):
    return jnp.conj(x)


@lowering("copy.default")
def copy(call, x, source, non_blocking=False):
    return jnp.broadcast_to(cast(source, x.dtype), x.shape)


@lowering("detach.default")
def detach(call, x):
    return jax.lax.stop_gradient(x)


@lowering("complex.default")
def complex_(call, real, imag):
    return jax.lax.complex(*jnp.broadcast_arrays(real, imag))


@lowering("polar.default")
def polar(call, radius, angle):
    """Compute polar. As in torch, the gradient takes the direction of the result, which is 0 where the radius is 0."""
    radius, angle = jnp.broadcast_arrays(radius, angle)
    value = jax.lax.complex(radius * jnp.cos(angle), radius * jnp.sin(angle))
    rule = lambda factors, outward, around: factors[0] * outward + factors[1] * around
    return derived(jax.lax.stop_gradient(value), rule, (jnp.sign(value), 1j * value), radius, angle)


@lowering("angle.default")
def angle(call, x):
    """Compute angle; of real numbers it is a step, without gradient."""
    if category(x.dtype) == 3:
        return atan2(call, x.imag, x.real)
    (x,) = promote_float(x)
    return jnp.where(x != x, jax.lax.stop_gradient(x), jnp.where(x < 0, jnp.pi, 0).astype(x.dtype))  # -0 gives 0 too


@lowering("view_as_real.default", "view_as_real_copy.default")
def view_as_real(call, x):
    return jnp.stack([x.real, x.imag], axis=-1)


@lowering("view_as_complex.default", "view_as_complex_copy.default")
def view_as_complex(call, x):
    return jax.lax.complex(x[..., 0], x[..., 1])
