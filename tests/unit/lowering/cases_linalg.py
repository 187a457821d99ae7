"""Arguments for linear algebra and Fourier transforms."""

import dataclasses

import torch

from tests.unit.lowering.cases_layers import size
from tests.unit.lowering.compare import Case, Draw, cases

CASES, case = cases()


def _regular(draw: Draw, size: int):
    """A well-conditioned matrix, with or without a batch."""
    shape = (*draw.shape(0, 1, smallest=1, largest=2), size, size)
    return draw.floats(shape) * 0.3 + 2 * torch.eye(size)


@case("linalg_inv_ex.default", "linalg_inv.default")
def _inverse(draw):
    return Case((_regular(draw, size(draw)),), outputs=1, scale=10)


@case("linalg_cholesky_ex.default")
def _cholesky(draw):
    return Case((_positive(draw),), {"upper": draw.flag()}, outputs=1, scale=10)


@case("linalg_solve_triangular.default")
def _solve_triangular(draw):
    upper, left = draw.flag(), draw.flag()
    a = _regular(draw, 3)
    a = a.triu() if upper else a.tril()
    b = draw.floats((*a.shape[:-2], 3, 2) if left else (*a.shape[:-2], 2, 3))
    return Case((a, b), {"upper": upper, "left": left}, scale=10)


@case("_linalg_det.default")
def _det(draw):
    return Case((_regular(draw, size(draw)),), outputs=1, scale=10)


@case("_linalg_slogdet.default")
def _slogdet(draw):
    return Case((_regular(draw, size(draw)),), outputs=2, scale=10)


@case("_linalg_solve_ex.default", "linalg_solve.default")
def _solve(draw):
    a = _regular(draw, 3)
    b = draw.floats((*a.shape[:-1],)) if draw.flag() else draw.floats((*a.shape[:-2], 3, 2))
    return Case((a, b), outputs=1, scale=10)


def _complex(draw, shape):
    return torch.complex(draw.floats(shape), draw.floats(shape))


@case("_fft_c2c.default")
def _fft_c2c(draw):
    x = _complex(draw, draw.shape(1, 3, smallest=2))
    dims = [dim % x.dim() for dim in draw.dims(x.dim(), 1)]
    return Case((x, dims, draw.int(0, 2), draw.flag()), scale=4)


@case("_fft_r2c.default")
def _fft_r2c(draw):
    x = draw.floats(draw.shape(1, 3, smallest=2))
    return Case((x, [x.dim() - 1], draw.int(0, 2), draw.flag()), scale=4)


@case("_fft_c2r.default")
def _fft_c2r(draw):
    n = draw.int(2, 6)
    x = _complex(draw, (*draw.shape(0, 2, smallest=1), n // 2 + 1))
    return Case((x, [x.dim() - 1], draw.int(0, 2), n), gradient=False, scale=4)


@case("linalg_matrix_exp.default")
def _matrix_exp(draw):
    return Case((_regular(draw, size(draw)) - 1,), scale=10)


@case("linalg_qr.default")
def _qr(draw):
    if draw.flag():
        return Case((_regular(draw, 3), draw.one("reduced", "complete")), scale=20)
    return Case((draw.floats((4, 2)), draw.one("reduced", "r")), gradient=False, scale=10)


@case("_linalg_svd.default")
def _svd(draw):
    x = _regular(draw, 3) * torch.tensor([1.0, 2, 4])
    if draw.flag():
        return Case((x, False, False), scale=10, gradient=False)
    return Case((x[..., :2], draw.flag(), True), scale=20, gradient=False)


@case("_linalg_eigh.default")
def _eigh(draw):
    return Case((_regular(draw, 3) * torch.tensor([1.0, 2, 4]), draw.one("L", "U")), outputs=1, scale=10)


@case("linalg_householder_product.default")
def _householder_product(draw):
    columns = draw.int(1, 3)
    shape = draw.shape(0, 1, smallest=1, largest=2)
    return Case((draw.floats((*shape, 4, columns)), draw.floats((*shape, draw.int(1, columns)))), scale=10)


@case("linalg_pinv.atol_rtol_tensor")
def _pinv(draw):
    limits = {} if draw.flag() else {"rtol": torch.tensor(0.4)}
    return Case((draw.floats((*draw.shape(0, 1, smallest=1, largest=2), 4, 2)),), limits, gradient=False, scale=40)


@case("cholesky.default")
def _old_cholesky(draw):
    return Case((_positive(draw), draw.flag()), scale=10)


def _positive(draw):
    """A positive definite matrix whose triangles differ: each operator reads one of them."""
    x = _regular(draw, size(draw))
    return x @ x.mT + 0.1 * draw.floats(x.shape)


def _factor(draw):
    x = _regular(draw, 3)
    upper = draw.flag()
    return (x.triu() if upper else x.tril()), upper


@case("cholesky_solve.default")
def _cholesky_solve(draw):
    factor, upper = _factor(draw)
    return Case((draw.floats((*factor.shape[:-2], 3, 2)), factor, upper), scale=10)


@case("_cholesky_solve_helper.default")
def _cholesky_solve_helper(draw):
    return dataclasses.replace(_cholesky_solve(draw), gradient=False)  # torch has none


@case("cholesky_inverse.default")
def _cholesky_inverse(draw):
    return Case(_factor(draw), scale=10)


@case("triangular_solve.default")
def _triangular_solve(draw):
    a, upper = _factor(draw)
    return Case((draw.floats((*a.shape[:-2], 3, 2)), a, upper, draw.flag(), draw.flag()), scale=10)


@case("linalg_cholesky.default")
def _linalg_cholesky(draw):
    return Case((_positive(draw),), {"upper": draw.flag()}, scale=10)


@case("linalg_eigh.default", "linalg_eigvalsh.default")
def _linalg_eigh(draw):
    x = _regular(draw, 3) * torch.tensor([1.0, 2, 4])
    return Case((x, draw.one("L", "U")), outputs=1, scale=10)
