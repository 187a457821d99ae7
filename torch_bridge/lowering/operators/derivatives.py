"""Derivatives as torch defines them where the formula's differ: at corners, ties and poles.

Source: torch's tools/autograd/derivatives.yaml and FunctionsManual.cpp.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from torch_bridge.lowering.errors import CannotRecord


def derived(value: Any, rule: Callable, factors: Any, *xs: Any):
    """Return `value` with the derivative `rule(factors, *x')`, linear in the derivatives x' of the xs.

    The factors may depend on the xs: second derivatives follow them.
    """

    @jax.custom_jvp
    def result(value, factors, *xs):
        return value

    @result.defjvp
    def derivative(primals, tangents):
        value, factors, *_ = primals
        return value, jnp.broadcast_to(rule(factors, *tangents[2:]), value.shape).astype(value.dtype)

    return result(value, factors, *xs)


def sloped(value: Any, *terms: tuple[Any, Any]):
    """Return `value` with the partial derivatives of `terms`: (x, partial derivative). Numbers count as constants."""
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return value
    terms = tuple((x, slope) for x, slope in terms if jnp.issubdtype(jnp.result_type(x), jnp.inexact))
    if not terms:
        return jax.lax.stop_gradient(value)
    rule = lambda slopes, *moves: sum(slope * move for slope, move in zip(slopes, moves, strict=True))
    return derived(value, rule, tuple(slope for _, slope in terms), *(jnp.asarray(x) for x, _ in terms))


def underived(value: Any, reason: str, *xs: Any):
    """Return `value`, computed from xs; raise CannotRecord if a gradient reaches it."""

    @jax.custom_vjp
    def result(value, xs):
        return value

    def refuse(_, slope):
        raise CannotRecord(reason)

    result.defvjp(lambda value, xs: (result(value, xs), None), refuse)
    moving = [x for x in xs if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)]
    if not moving or not jnp.issubdtype(value.dtype, jnp.inexact):
        return jax.lax.stop_gradient(value)
    return result(jax.lax.stop_gradient(value), moving)


def absolute(x):
    """Return |x|, with derivative 0 at 0, as in torch (JAX's own has 1)."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.abs(x)
    return derived(jnp.abs(x), lambda sign, move: along(sign, move), jnp.sign(x), x)


def along(direction, move):
    """Return the real part of move in a direction: the derivative of a real function of real or complex numbers."""
    return jnp.real(jnp.conj(direction) * move) if jnp.iscomplexobj(direction) else direction * move


def shared(value, x, axes, kept):
    """Return `value`, picked out of x along axes, with its gradient divided among all elements that equal it.

    kept: the value with those axes of size 1.
    """
    same = (x == kept) | ((x != x) & (kept != kept))
    part = same / jnp.sum(same, axes, keepdims=True)
    shape = value.shape
    rule = lambda part, move: jnp.sum(part * move, axes).reshape(shape)
    return derived(jax.lax.stop_gradient(value), rule, part.astype(x.dtype), x)


def zero_where(condition, x):
    return jnp.where(condition, jnp.zeros((), x.dtype), x)
