"""LU factorizations and solutions with them, eigenvalues, and products with Householder reflections."""

import jax
import jax.numpy as jnp

from torch_bridge.lowering.operators.derivatives import derived
from torch_bridge.lowering.table import lowering


def _factored(x, pivot: bool):
    if not pivot:
        raise NotImplementedError("an LU factorization without pivoting (pivot=False): torch has it on GPUs only")
    return jax.lax.linalg.lu(x)


@lowering("linalg_lu_factor_ex.default")
def lu_factor(call, x, *, pivot=True, check_errors=False):
    """Return both factors in one matrix, the exchanged rows counted from 1, and LAPACK's info (see `first_zero`)."""
    factors, pivots, _ = _factored(x, pivot)
    return factors, pivots + 1, first_zero(factors)


def first_zero(factors):
    """Return the place of the first 0 on the diagonal, counted from 1; 0 if there is none. LAPACK's info."""
    zero = jnp.diagonal(factors, axis1=-2, axis2=-1) == 0
    if not zero.shape[-1]:
        return jnp.zeros(factors.shape[:-2], jnp.int32)
    return jnp.where(jnp.any(zero, -1), jnp.argmax(zero, -1) + 1, 0).astype(jnp.int32)


@lowering("linalg_lu.default")
def lu(call, x, *, pivot=True):
    """Return P, L and U, whose product is x."""
    factors, _, order = _factored(x, pivot)
    return _permutation(order, x.dtype), *_triangles(factors)


@lowering("lu_unpack.default")
def lu_unpack(call, factors, pivots, unpack_data=True, unpack_pivots=True):
    nothing = jnp.zeros(0, factors.dtype)
    permutation = _permutation(_order(factors, pivots), factors.dtype) if unpack_pivots else nothing
    return permutation, *(_triangles(factors) if unpack_data else (nothing, nothing))


def _order(factors, pivots):
    return jax.lax.linalg.lu_pivots_to_permutation(pivots - 1, factors.shape[-2])


def _permutation(order, dtype):
    return jnp.swapaxes(jnp.eye(order.shape[-1], dtype=dtype)[order], -1, -2)


def _triangles(factors):
    rows, columns = factors.shape[-2:]
    size = min(rows, columns)
    lower = jnp.tril(factors[..., :size], -1) + jnp.eye(rows, size, dtype=factors.dtype)
    return lower, jnp.triu(factors[..., :size, :])


@lowering("linalg_lu_solve.default")
def lu_solve(call, factors, pivots, b, *, left=True, adjoint=False):
    """Solve A x = b, or x A = b if not left, with the adjoint of A if `adjoint`."""
    if not left:
        return _adjoint(lu_solve(call, factors, pivots, _adjoint(b), adjoint=not adjoint))
    batch = jnp.broadcast_shapes(factors.shape[:-2], b.shape[:-2])
    order = jnp.broadcast_to(_order(factors, pivots), (*batch, factors.shape[-1]))
    factors, b = jnp.broadcast_to(factors, batch + factors.shape[-2:]), jnp.broadcast_to(b, batch + b.shape[-2:])
    solve = jax.lax.linalg.triangular_solve
    if not adjoint:
        b = jnp.take_along_axis(b, order[..., None], -2)
        b = solve(factors, b, left_side=True, lower=True, unit_diagonal=True)
        return solve(factors, b, left_side=True, lower=False)
    b = solve(factors, b, left_side=True, lower=False, transpose_a=True, conjugate_a=True)
    b = solve(factors, b, left_side=True, lower=True, unit_diagonal=True, transpose_a=True, conjugate_a=True)
    return jnp.take_along_axis(b, jnp.argsort(order, -1)[..., None], -2)


def _adjoint(x):
    return jnp.swapaxes(x, -1, -2).conj()


@lowering("linalg_eig.default")
def eig(call, x):
    """Return eigenvalues, and eigenvectors of length 1. Source of the derivative: torch's linalg_eig_jvp."""
    values, vectors = jnp.linalg.eig(jax.lax.stop_gradient(x))

    def of_values(vectors, move):
        return jnp.diagonal(_in_basis(vectors, move), axis1=-2, axis2=-1)

    def of_vectors(factors, move):
        values, vectors = factors
        gap = values[..., None, :] - values[..., :, None]
        same = jnp.eye(values.shape[-1], dtype=bool)
        turn = jnp.where(same, 0, _in_basis(vectors, move) / jnp.where(same, 1, gap))
        turned = vectors @ turn
        stretch = jnp.sum(vectors.conj() * turned, -2, keepdims=True).real
        return turned - vectors * stretch

    moving = derived(values, of_values, vectors, x)
    return moving, derived(vectors, of_vectors, (values, vectors), x)


def _in_basis(vectors, move):
    return jnp.linalg.solve(vectors, move.astype(vectors.dtype) @ vectors)


@lowering("ormqr.default")
def ormqr(call, x, tau, other, left=True, transpose=False):
    """Return Q other, or other Q if not left. Q is the product of the reflections in x's columns, or its adjoint if
    transpose."""
    if not left:
        return _adjoint(ormqr(call, x, tau, _adjoint(other), transpose=not transpose))
    rows, columns = x.shape[-2:]
    below = jnp.tril(x, -1) + jnp.eye(rows, columns, dtype=x.dtype)
    for k in range(tau.shape[-1]) if transpose else reversed(range(tau.shape[-1])):
        v, size = below[..., k : k + 1], tau[..., k, None, None]
        other = other - (size.conj() if transpose else size) * v * (_adjoint(v) @ other)
    return other
