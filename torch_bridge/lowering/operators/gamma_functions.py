"""Derivatives of the gamma function's logarithm, and Hurwitz's zeta function, from which they are computed.

JAX's own are wrong for arguments below -8, because their series begins with a fixed number of terms.
"""

import functools

import jax
import jax.numpy as jnp

from torch_bridge.lowering.dtypes import promote_float
from torch_bridge.lowering.operators.derivatives import sloped
from torch_bridge.lowering.table import lowering

LOWEST = -(2.0**23)  # below it every float32 is an integer, a pole


def _at_pole(x):
    return (x <= 0) & (x == jnp.floor(x))


def _zeta(s, q):
    """Return the sum over k of (q + k)^-s, for s > 1 and q that is no pole."""
    s, q = jnp.broadcast_arrays(s, q)
    waits = lambda q: (q < 1) & (q > LOWEST) & ~_at_pole(q)

    def add(state):
        total, q = state
        return total + jnp.where(waits(q), q**-s, 0), jnp.where(waits(q), q + 1, q)

    total, q = jax.lax.while_loop(lambda state: waits(state[1]).any(), add, (jnp.zeros_like(q), q))
    return total + jax.scipy.special.zeta(s, q)


def _zeta_or_nan(s, q):
    """Return zeta, but NaN for s < 1, and for a negative q if s is no integer."""
    value = jnp.where((s > 1) & _at_pole(q), jnp.inf, _zeta(s, q))
    return jnp.where((s < 1) | ((q < 0) & (s != jnp.floor(s)) & ~_at_pole(q)), jnp.nan, value)


@lowering("special_zeta.default")
def zeta(call, s, q):
    """Compute zeta, without a derivative with respect to s, as in torch."""
    s, q = promote_float(s, q)
    order, place = (jax.lax.stop_gradient(value) for value in (s, q))
    return sloped(_zeta_or_nan(order, place), (q, -order * _zeta_or_nan(order + 1, place)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _polygamma(order: int, x):
    sign = 1.0 if order % 2 else -1.0
    factorial = jnp.exp(jax.lax.lgamma(jnp.asarray(order + 1, x.dtype)))
    return jnp.where(_at_pole(x), sign * jnp.inf, sign * factorial * _zeta(jnp.asarray(order + 1, x.dtype), x))


@_polygamma.defjvp
def _derivative(order: int, primals, tangents):
    (x,), (move,) = primals, tangents
    return _polygamma(order, x), _polygamma(order + 1, x) * move


def digamma(x):
    """Compute digamma; at 0 return an infinity whose sign is that of the pole's side, as torch, where JAX has NaN."""
    fixed = jax.lax.stop_gradient(x)
    pole = fixed == 0
    value = jnp.where(pole, -jnp.copysign(jnp.inf, fixed), jax.scipy.special.digamma(jnp.where(pole, 1, fixed)))
    return sloped(value, (x, _polygamma(1, x)))


@lowering("polygamma.default")
def polygamma(call, order, x):
    (x,) = promote_float(x)
    return _polygamma(order, x) if order else digamma(x)
