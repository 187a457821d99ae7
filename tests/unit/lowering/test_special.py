"""Special functions equal torch's over their whole domain, and have a derivative only where torch has one."""

import jax
import numpy as np
import pytest
import torch

from tests.unit.lowering.compare import Case, check, operator
from torch_bridge.lowering.operators import TABLE
from torch_bridge.lowering.table import Call

POSITIVE = [0.0, 1e-6, 0.1, 0.5, 1, 2, 3, 5, 6.5, 7.9, 8.1, 9, 12, 20, 50, 80]
X = torch.tensor([*POSITIVE, *(-x for x in POSITIVE), torch.inf, torch.nan])
POINTS, DEGREES = torch.linspace(-2, 2, 17).repeat_interleave(13), torch.arange(-2.0, 11).repeat(17)
POLYNOMIALS = {"default": (POINTS, DEGREES), "x_scalar": (1.5, DEGREES), "n_scalar": (POINTS, 4)}
FUNCTIONS = {name: (X,) for name in sorted(TABLE) if "bessel" in name or "airy" in name}
FUNCTIONS |= {name: POLYNOMIALS[name.rpartition(".")[2]] for name in sorted(TABLE) if "_polynomial_" in name}


@pytest.mark.parametrize("name", FUNCTIONS, ids=lambda name: name.removeprefix("aten.special_"))
def test_equals_torch(name):
    arguments = FUNCTIONS[name]
    exact = operator(name)(*(a.double() if isinstance(a, torch.Tensor) else a for a in arguments)).numpy()
    ours = TABLE[name](Call(), *(a.numpy() if isinstance(a, torch.Tensor) else a for a in arguments))
    assert ours.dtype == np.float32
    size = np.abs(exact[np.isfinite(exact)]).max(initial=1)
    np.testing.assert_allclose(ours, exact, rtol=2e-5, atol=1e-6 * min(size, 1e3))


def test_a_derivative_that_torch_does_not_have_is_refused():
    with pytest.raises(NotImplementedError, match="torch has no derivative of bessel_j"):
        jax.grad(lambda x: TABLE["aten.special_bessel_j0.default"](Call(), x))(1.0)


@pytest.mark.parametrize("order", [0, 1, 2, 3, 4])
def test_polygamma_at_its_poles_is_torchs_infinity(order):
    x = torch.tensor([0.0, 0.5] if order < 2 else [-2.0, -1.0, 0.0, 0.5])  # torch rounds those of the first below 0
    ours = TABLE["aten.polygamma.default"](Call(), order, x.numpy())
    np.testing.assert_allclose(ours, torch.polygamma(order, x), rtol=1e-5)


@pytest.mark.parametrize("name", ["linalg_cholesky_ex", "linalg_inv_ex", "_linalg_solve_ex"])
def test_info_of_a_factorization_names_the_failing_row(name):
    matrices = torch.stack([torch.eye(3), torch.diag(torch.tensor([1.0, 0, 1])), torch.zeros(3, 3)])
    more = (torch.ones(3, 1),) if "solve" in name else ()
    theirs = operator(f"aten.{name}.default")(matrices, *more)[-1]
    ours = TABLE[f"aten.{name}.default"](Call(), matrices.numpy(), *(m.numpy() for m in more))[-1]
    assert np.asarray(ours).tolist() == theirs.tolist() == [0, 2, 1]


def test_the_angle_of_minus_zero_is_torchs():
    x = torch.tensor([-1.0, -0.0, 0.0, 2.0])
    np.testing.assert_allclose(TABLE["aten.angle.default"](Call(), x.numpy()), torch.angle(x), rtol=1e-6)


def test_a_hermitian_pseudoinverse_reads_one_triangle():
    x = torch.tensor([[2.0, 7.0, -3.0], [1.0, 3.0, 9.0], [0.5, -1.0, 1.0]])
    ours = TABLE["aten.linalg_pinv.atol_rtol_tensor"](Call(), x.numpy(), hermitian=True)
    np.testing.assert_allclose(ours, torch.linalg.pinv(x, hermitian=True), rtol=1e-4, atol=1e-5)


BELOW = torch.tensor([-0.5, -3.7, -8.39, -8.7168, -9.0434, -9.37, -41.3, -1000.25])


@pytest.mark.parametrize("case", [("digamma.default", BELOW), *(("polygamma.default", n, BELOW) for n in range(4))])
def test_far_below_zero_values_and_gradients_are_torchs(case):
    check(f"aten.{case[0]}", Case(case[1:]))


@pytest.mark.parametrize("order", [2.0, 3.0, 2.5])
def test_zeta_far_below_zero_is_torchs(order):
    ours = TABLE["aten.special_zeta.default"](Call(), np.float32(order), BELOW.numpy())
    np.testing.assert_allclose(ours, torch.special.zeta(torch.tensor(order), BELOW), rtol=1e-4)
