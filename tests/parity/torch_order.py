"""Matrix products whose terms are added one after another, as torch's CPU kernels add those of small matrices."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

LONGEST = 256  # terms; the records have longer products at the originals' full widths only


def in_torch_order(function):
    """`function` with every plain float32 matrix product of its trace summed term by term, with fused multiply-adds.

    XLA adds in an order of its own; BatchNorm over four rows shows the difference. Of products longer than `LONGEST`
    torch's order was not found: they are rounded once, which is nearest on average. Needs jax_enable_x64.
    """

    @functools.wraps(function)
    def ordered(*arguments):
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        return jax.tree.unflatten(jax.tree.structure(shapes), _evaluate(closed, jax.tree.leaves(arguments)))

    return ordered


def _evaluate(closed, arguments):
    jaxpr = closed.jaxpr
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *arguments), strict=True))
    read = lambda atom: atom.val if isinstance(atom, Literal) else values[atom]
    for equation in jaxpr.eqns:
        primitive, options = equation.primitive, equation.params
        given = [read(atom) for atom in equation.invars]
        if primitive is jax.lax.dot_general_p and _is_plain(options["dimension_numbers"], given):
            results = [_product(*given, options["dimension_numbers"][0])]
        elif primitive.name in ("jit", "pjit", "custom_jvp_call", "custom_vjp_call"):
            results = _evaluate(options.get("jaxpr") or options["call_jaxpr"], given)
        else:
            results = primitive.bind(*given, **options)
            results = results if primitive.multiple_results else [results]
        values |= zip(equation.outvars, results, strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def _is_plain(dimension_numbers, given) -> bool:
    """Two float32 arrays without batch axes; torch's order of others is not known."""
    return given[0].dtype == jnp.float32 and not any(dimension_numbers[1])


def _product(first, second, contracted):
    """jax.lax.dot_general along `contracted`, the axes of each that are summed over."""
    terms, shape = [], []
    for x, axes in zip((first, second), contracted, strict=True):
        shape += [x.shape[axis] for axis in range(x.ndim) if axis not in axes]
        rows = jnp.moveaxis(x, axes, range(len(axes))).astype(jnp.float64)
        terms.append(rows.reshape(math.prod(x.shape[axis] for axis in axes), -1))
    if len(terms[0]) > LONGEST:
        return (terms[0].T @ terms[1]).astype(jnp.float32).reshape(shape)

    def add(total, pair):  # a product of two float32 is exact in float64, so this rounds once
        return (total + pair[0][:, None] * pair[1]).astype(jnp.float32), None

    zeros = jnp.zeros([x.shape[1] for x in terms], jnp.float32)
    return jax.lax.scan(add, zeros, tuple(terms))[0].reshape(shape)
