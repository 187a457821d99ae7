"""Matrix factorizations and solutions with them."""

import jax
import jax.numpy as jnp

from torch_bridge.lowering.operators.derivatives import derived, underived
from torch_bridge.lowering.table import lowering


@lowering("linalg_matrix_exp.default")
def matrix_exp(call, x):
    return jax.scipy.linalg.expm(x)


@lowering("linalg_qr.default")
def qr(call, x, mode="reduced"):
    if mode == "r":
        why = (
            "torch has no derivative of linalg.qr with mode='r', which leaves Q out: take mode='reduced', or detach() R"
        )
        return jnp.zeros(0, x.dtype), underived(jnp.linalg.qr(x, mode="r"), why, x)
    return tuple(jnp.linalg.qr(x, mode=mode))


@lowering("_linalg_svd.default")
def svd(call, x, full_matrices=False, compute_uv=True, *, driver=None):
    if compute_uv:
        return tuple(jnp.linalg.svd(x, full_matrices=full_matrices))
    nothing = jnp.zeros(0, x.dtype)
    return nothing, jnp.linalg.svd(x, compute_uv=False), nothing


@lowering("_linalg_eigh.default", "linalg_eigh.default")
def eigh(call, x, UPLO="L", compute_v=True):
    values, vectors = jnp.linalg.eigh(_hermitian(x, UPLO.upper() == "U"), symmetrize_input=True)
    return values, vectors if compute_v else jnp.zeros(0, x.dtype)


def _hermitian(x, upper):
    """Return the Hermitian matrix with x's lower (upper) triangle. Its gradient is that of all of x, as in torch."""
    half = jnp.triu(x) if upper else jnp.tril(x)
    diagonal = jnp.eye(x.shape[-1], dtype=bool)
    return derived(half + jnp.where(diagonal, 0, _adjoint(half)), lambda _, move: move, (), x)


@lowering("linalg_householder_product.default")
def householder_product(call, x, tau):
    """Return the product of I - tau v v^T over the columns v of x, whose diagonal counts as 1."""
    rows, columns = x.shape[-2:]
    below = jnp.tril(x, -1) + jnp.eye(rows, columns, dtype=x.dtype)
    product = jnp.broadcast_to(jnp.eye(rows, columns, dtype=x.dtype), x.shape)
    for k in reversed(range(tau.shape[-1])):
        v = below[..., k : k + 1]
        product = product - tau[..., k, None, None] * v * (jnp.swapaxes(v, -1, -2) @ product)
    return product


@lowering("linalg_pinv.atol_rtol_tensor")
def pinv(call, x, *, atol=None, rtol=None, hermitian=False):
    """Compute the pseudoinverse; singular values up to max(atol, rtol * largest) count as 0. The gradient is that of a
    matrix of constant rank. Source: Golub and Pereyra 1973, equation 4.12, as in torch."""
    if not x.size:
        return jnp.swapaxes(x, -1, -2)
    fixed = jax.lax.stop_gradient(x)
    if hermitian:  # of which one triangle is read
        fixed = jnp.tril(fixed) + _adjoint(jnp.tril(fixed, -1))
    u, s, vh = jnp.linalg.svd(fixed, full_matrices=False)
    if rtol is None:
        rtol = 0 if atol is not None else max(x.shape[-2:]) * jnp.finfo(x.dtype).eps
    floor = jnp.maximum(0 if atol is None else atol, rtol * jnp.max(s, axis=-1))
    kept = s > jnp.asarray(floor)[..., None]
    inverse = jnp.where(kept, 1 / jnp.where(kept, s, 1), 0)
    return _inverse_of(_adjoint(vh) @ (inverse[..., None] * _adjoint(u)), x)


def _adjoint(x):
    return jnp.swapaxes(x, -1, -2).conj()


def _inverse_of(p, x):
    """Return p, the pseudoinverse of x, with its derivative."""

    def rule(factors, move):
        p, x = factors
        turned, rows, columns = _adjoint(move), jnp.eye(x.shape[-2], dtype=x.dtype), jnp.eye(x.shape[-1], dtype=x.dtype)
        across = p @ _adjoint(p) @ turned @ (rows - x @ p) + (columns - p @ x) @ turned @ _adjoint(p) @ p
        return across - p @ move @ p

    return derived(p, rule, (p, x), x)


@lowering("linalg_eigvalsh.default")
def eigvalsh(call, x, UPLO="L"):
    return eigh(call, x, UPLO)[0]


@lowering("linalg_cholesky.default", "cholesky.default")
def cholesky(call, x, upper=False):
    lower = jnp.linalg.cholesky(_hermitian(x, upper), symmetrize_input=True)
    return _adjoint(lower) if upper else lower


@lowering("linalg_cholesky_ex.default")
def cholesky_ex(call, x, *, upper=False, check_errors=False):
    """Return NaN for a matrix that is not positive definite, where torch.linalg.cholesky raises; return its triangle if
    its first element is not positive, as LAPACK does."""
    factor = cholesky(call, x, upper)
    if not x.shape[-1]:
        return factor, jnp.zeros(x.shape[:-2], jnp.int32)
    failed = x[..., 0, 0].real <= 0
    factor = jnp.where(failed[..., None, None], jnp.triu(x) if upper else jnp.tril(x), factor)
    return factor, _not_positive(jax.lax.stop_gradient(_hermitian(x, upper)))


def _not_positive(whole):
    """Return the order of the first leading minor that is not positive; 0 if there is none. LAPACK's info."""

    def eliminate(k, carry):
        rest, info = carry
        pivot = rest[..., k, k].real
        info = jnp.where((info == 0) & ~(pivot > 0), k + 1, info)
        factor = rest[..., :, k] / pivot[..., None]
        return rest - factor[..., :, None] * rest[..., k, :][..., None, :], info

    info = jnp.zeros(whole.shape[:-2], jnp.int32)
    return jax.lax.fori_loop(0, whole.shape[-1], eliminate, (whole, info))[1].astype(jnp.int32)


def _triangular(a, b, upper: bool, transpose: bool = False, unit: bool = False, conjugate: bool = False):
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = jnp.broadcast_to(a, batch + a.shape[-2:]), jnp.broadcast_to(b, batch + b.shape[-2:])
    trans = 2 if conjugate else int(transpose)
    return jax.scipy.linalg.solve_triangular(a, b, trans=trans, lower=not upper, unit_diagonal=unit)


@lowering("cholesky_solve.default", "_cholesky_solve_helper.default")
def cholesky_solve(call, b, factor, upper=False):
    """Solve L L^H x = b, reading one triangle of L; the gradient is that of all of L, as in torch."""

    def solve(factor, b):
        first = _triangular(factor, b, upper, conjugate=upper)
        return _triangular(factor, first, upper, conjugate=not upper)

    def rule(factors, move, turn):
        b, factor = factors
        product = _adjoint(turn) @ factor if upper else turn @ _adjoint(factor)
        return solve(factor, move - (product + _adjoint(product)) @ cholesky_solve(call, b, factor, upper))

    return derived(solve(jax.lax.stop_gradient(factor), jax.lax.stop_gradient(b)), rule, (b, factor), b, factor)


@lowering("cholesky_inverse.default")
def cholesky_inverse(call, factor, upper=False):
    return cholesky_solve(call, jnp.eye(factor.shape[-1], dtype=factor.dtype), factor, upper)


@lowering("triangular_solve.default")
def triangular_solve(call, b, a, upper=True, transpose=False, unitriangular=False):
    """Return the solution, and the matrix once more."""
    return _triangular(a, b, upper, transpose, unitriangular), a
