"""Special functions: Bessel, gamma and zeta functions, orthogonal polynomials, and functions made of them.

Those that torch does not differentiate are computed in float64 from their series and have no derivative here either.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from torch_bridge.lowering.dtypes import promote_float
from torch_bridge.lowering.operators.derivatives import sloped
from torch_bridge.lowering.table import lowering


@lowering("i0.default", "special_modified_bessel_i0.default")
def i0(call, x):
    (x,) = promote_float(x)
    return sloped(jax.scipy.special.i0(x), (x, jax.scipy.special.i1(x)))


@lowering("special_i0e.default")
def i0e(call, x):
    (x,) = promote_float(x)
    value = jax.scipy.special.i0e(x)
    return sloped(value, (x, jax.scipy.special.i1e(x) - jnp.sign(x) * value))


@lowering("special_i1.default", "special_modified_bessel_i1.default")
def i1(call, x):
    (x,) = promote_float(x)
    value, safe = jax.scipy.special.i1(x), jnp.where(x == 0, 1, x)
    return sloped(value, (x, jnp.where(x == 0, 0.5, jax.scipy.special.i0(x) - value / safe)))


@lowering("special_i1e.default")
def i1e(call, x):
    (x,) = promote_float(x)
    value, safe = jax.scipy.special.i1e(x), jnp.where(x == 0, 1, x)
    slope = jax.scipy.special.i0e(x) - value * (jnp.sign(x) + 1 / safe)
    return sloped(value, (x, jnp.where(x == 0, 0.5, slope)))


@lowering("special_log_ndtr.default")
def log_ndtr(call, x):
    (x,) = promote_float(x)
    return jax.scipy.special.log_ndtr(x)


@lowering("special_entr.default")
def entr(call, x):
    (x,) = promote_float(x)
    value = jax.scipy.special.entr(jax.lax.stop_gradient(x))
    return sloped(jnp.where(x == x, value, x), (x, -jnp.log(x) - 1))


@lowering("logit.default")
def logit(call, x, eps=None):
    """Compute logit. The gradient is infinite at 0 and 1; beyond eps, if given, it is 0."""
    (x,) = promote_float(x)
    within = x if eps is None else jnp.clip(x, eps, 1 - eps)
    slope = 1 / (x * (1 - x))
    if eps is None:
        slope = jnp.where((x < 0) | (x > 1), jnp.nan, slope)
    else:
        slope = jnp.where((x < eps) | (x > 1 - eps), 0, slope)
    return sloped(jax.lax.stop_gradient(jnp.log(within / (1 - within))), (x, slope))


@lowering("ldexp.Tensor")
def ldexp(call, x, power):
    x, power = promote_float(x, power)
    return x * jnp.exp2(power)


@lowering("frexp.Tensor")
def frexp(call, x):
    return tuple(jnp.frexp(x))


@lowering("special_erfcx.default")
def erfcx(call, x):
    """Compute exp(x^2) erfc(x); above 5 by its asymptotic series, because the factors leave float32's range."""
    (x,) = promote_float(x)
    small = jnp.minimum(x, 5)
    large = jnp.maximum(x, 5)
    y = 1 / (2 * large * large)
    series = (1 - y * (1 - 3 * y * (1 - 5 * y * (1 - 7 * y)))) / (large * math.sqrt(math.pi))
    return jnp.where(x > 5, series, jnp.exp(small * small) * jax.scipy.special.erfc(small))


def _float64(function: Callable) -> Callable:
    """Return a lowering that computes in float64 and returns the argument's dtype; it refuses a derivative, as
    torch."""

    def lower(call, *values):
        values = promote_float(*values)

        @jax.custom_jvp
        def result(*values):
            with jax.enable_x64(True):
                wide = function(*(value.astype(jnp.float64) for value in jnp.broadcast_arrays(*values)))
                return wide.astype(values[0].dtype)

        @result.defjvp
        def derivative(primals, tangents):
            raise NotImplementedError(f"torch has no derivative of {function.__name__.strip('_')}")

        return result(*values)

    return lower


_NEAR = 8.0  # up to here power series, beyond asymptotic ones: both have seven digits there
_TERMS = 40
_EULER = 0.5772156649015329


def _series(x, order: int, sign: int):
    """Return J or I of order 0 or 1 (sign -1 or 1), and the same sum with each term times its harmonic numbers."""
    quarter = sign * x * x / 4
    term = jnp.ones_like(x) if order == 0 else x / 2
    total, weighted, harmonic = term, term * order, float(order)
    for k in range(1, _TERMS):
        term = term * quarter / (k * (k + order))
        harmonic += 1 / k + (1 / (k + 1) if order else 0) if order else 1 / k
        total, weighted = total + term, weighted + term * harmonic
    return total, weighted


def _hankel(x, order: int, count: int = 12):
    """Return the terms a_k(order) / x^k of the asymptotic series, k from 0. Source: DLMF 10.17.1."""
    term, terms = jnp.ones_like(x), [jnp.ones_like(x)]
    for k in range(1, count):
        term = term * (4 * order * order - (2 * k - 1) ** 2) / (8 * k * x)
        terms.append(term)
    return terms


def _oscillation(x, order: int):
    """Return the even and odd parts of Hankel's series, and the phase. Source: DLMF 10.17.3."""
    terms = _hankel(x, order)
    even = sum((-1) ** (k // 2) * term for k, term in enumerate(terms) if k % 2 == 0)
    odd = sum((-1) ** (k // 2) * term for k, term in enumerate(terms) if k % 2 == 1)
    return even, odd, x - order * math.pi / 2 - math.pi / 4


def _bessel_j(order: int):
    def bessel_j(x):
        size = jnp.abs(x)
        far = jnp.maximum(size, _NEAR)
        even, odd, phase = _oscillation(far, order)
        beyond = jnp.sqrt(2 / (math.pi * far)) * (even * jnp.cos(phase) - odd * jnp.sin(phase))
        value = jnp.where(size > _NEAR, beyond, _series(jnp.minimum(size, _NEAR), order, -1)[0])
        return value * jnp.sign(x) if order else value

    return bessel_j


def _bessel_y(order: int):
    def bessel_y(x):
        far, near = jnp.maximum(x, _NEAR), jnp.clip(x, 1e-300, _NEAR)
        even, odd, phase = _oscillation(far, order)
        beyond = jnp.sqrt(2 / (math.pi * far)) * (even * jnp.sin(phase) + odd * jnp.cos(phase))
        total, weighted = _series(near, order, -1)
        within = 2 / math.pi * (jnp.log(near / 2) + _EULER) * total
        within = within - weighted * (2 if order == 0 else 1) / math.pi - (2 / (math.pi * near) if order else 0)
        value = jnp.where(x > _NEAR, beyond, within)
        return jnp.where(x < 0, jnp.nan, jnp.where(x == 0, -jnp.inf, value))

    return bessel_y


def _bessel_k(order: int, scaled: bool):
    def bessel_k(x):
        far, near = jnp.maximum(x, _NEAR), jnp.clip(x, 1e-300, _NEAR)
        beyond = jnp.sqrt(math.pi / (2 * far)) * sum(_hankel(far, order)) * (1 if scaled else jnp.exp(-far))
        total, weighted = _series(near, order, 1)
        within = (-1) ** (order + 1) * (jnp.log(near / 2) + _EULER) * total
        within = within + (weighted if order == 0 else 1 / near - weighted / 2)
        value = jnp.where(x > _NEAR, beyond, within * jnp.exp(near) if scaled else within)
        return jnp.where(x < 0, jnp.nan, jnp.where(x == 0, jnp.inf, value))

    return bessel_k


for _order in (0, 1):
    lowering(f"special_bessel_j{_order}.default")(_float64(_bessel_j(_order)))
    lowering(f"special_bessel_y{_order}.default")(_float64(_bessel_y(_order)))
    lowering(f"special_modified_bessel_k{_order}.default")(_float64(_bessel_k(_order, False)))
    lowering(f"special_scaled_modified_bessel_k{_order}.default")(_float64(_bessel_k(_order, True)))


def _spherical_bessel_j0(x):
    return jnp.where(jnp.isinf(x), 0, jnp.sinc(x / math.pi))


def _airy_ai(x):
    """Compute Ai. Source: DLMF 9.4.1 near 0; 9.7.5 and 9.7.9 far from it."""
    near = jnp.clip(x, -6.0, 6.0)
    cube = near**3
    first, second = jnp.ones_like(x), near
    even, odd = first, second
    for k in range(1, _TERMS):
        first = first * cube / ((3 * k - 1) * (3 * k))
        second = second * cube / ((3 * k) * (3 * k + 1))
        even, odd = even + first, odd + second
    within = even / (3 ** (2 / 3) * math.gamma(2 / 3)) - odd / (3 ** (1 / 3) * math.gamma(1 / 3))
    far = jnp.maximum(jnp.abs(x), 6.0)
    zeta = 2 / 3 * far**1.5
    term, terms = jnp.ones_like(x), [jnp.ones_like(x)]
    for k in range(1, 12):
        term = term * (6 * k - 5) * (6 * k - 3) * (6 * k - 1) / (216 * k * (2 * k - 1)) / zeta
        terms.append(term)
    right = jnp.exp(-zeta) * sum((-1) ** k * term for k, term in enumerate(terms)) / 2
    even = sum((-1) ** (k // 2) * term for k, term in enumerate(terms) if k % 2 == 0)
    odd = sum((-1) ** (k // 2) * term for k, term in enumerate(terms) if k % 2 == 1)
    left = jnp.cos(zeta - math.pi / 4) * even + jnp.sin(zeta - math.pi / 4) * odd
    beyond = jnp.where(x > 0, right, left) / (math.sqrt(math.pi) * far**0.25)
    return jnp.where(jnp.isinf(x), jnp.nan, jnp.where(jnp.abs(x) > 6, beyond, within))  # as in torch


lowering("special_spherical_bessel_j0.default")(_float64(_spherical_bessel_j0))
lowering("special_airy_ai.default")(_float64(_airy_ai))


def _polynomial(first: Callable, step: Callable, start: Callable = lambda x: x):
    """Return p_0 = 1, p_1 = first(x), p_(k+1) = step(k, x, p_k, p_(k-1)); 0 of negative degree. start: replaces x."""

    def polynomial(x, n):
        x, n = start(x), jnp.trunc(n)

        def one_more(state):
            k, now, before = state
            new = step(k, x, now, before)
            return k + 1, jnp.where(n > k, new, now), jnp.where(n > k, now, before)

        one = jnp.ones_like(x)
        low = jnp.where(n >= 1, first(x), one)
        top = jnp.max(n) if n.size else 0.0
        last = jax.lax.while_loop(lambda state: state[0] < top, one_more, (jnp.float64(1), low, one))[1]
        return jnp.where(n < 0, 0, last)

    return polynomial


_chebyshev = functools.partial(_polynomial, step=lambda k, x, now, before: 2 * x * now - before)
_POLYNOMIALS = {
    "hermite_polynomial_h": _polynomial(lambda x: 2 * x, lambda k, x, now, before: 2 * x * now - 2 * k * before),
    "hermite_polynomial_he": _polynomial(lambda x: x, lambda k, x, now, before: x * now - k * before),
    "laguerre_polynomial_l": _polynomial(
        lambda x: 1 - x, lambda k, x, now, before: ((2 * k + 1 - x) * now - k * before) / (k + 1)
    ),
    "legendre_polynomial_p": _polynomial(
        lambda x: x, lambda k, x, now, before: ((2 * k + 1) * x * now - k * before) / (k + 1)
    ),
}
for _kind, _first in {
    "t": lambda x: x,
    "u": lambda x: 2 * x,
    "v": lambda x: 2 * x - 1,
    "w": lambda x: 2 * x + 1,
}.items():
    _POLYNOMIALS[f"chebyshev_polynomial_{_kind}"] = _chebyshev(_first)
    _POLYNOMIALS[f"shifted_chebyshev_polynomial_{_kind}"] = _chebyshev(_first, start=lambda x: 2 * x - 1)
for _name, _function in _POLYNOMIALS.items():
    for _overload in ("default", "x_scalar", "n_scalar"):
        lowering(f"special_{_name}.{_overload}")(_float64(_function))
