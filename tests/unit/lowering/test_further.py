"""Operators with little to draw: factorizations, segments, histograms, copies. Values and gradients are torch's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.unit.lowering.compare import Case, check
from torch_bridge.from_torch import from_torch

RANDOM = torch.Generator().manual_seed(0)
SQUARE, TALL, WIDE = (torch.randn(shape, generator=RANDOM) for shape in ((2, 3, 3), (4, 3), (2, 3, 4)))
FACTORS, PIVOTS = torch.linalg.lu_factor(SQUARE)
REFLECTIONS, TAU = torch.geqrf(TALL)
LENGTHS = torch.tensor([2, 0, 1])
IMAGE = torch.randn(2, 3, 4, 4, generator=RANDOM)
POOLED, PLACES = torch.nn.functional.max_pool2d(IMAGE, 2, return_indices=True)
SHIFTS = torch.rand(2, 3, 2, generator=RANDOM)
RUNNING = torch.rand(4, 3, generator=RANDOM)
SYMMETRIC = SQUARE[0] + SQUARE[0].T

FURTHER = [
    ("linalg_lu_factor_ex.default", SQUARE),
    ("linalg_lu.default", TALL),
    ("linalg_lu.default", WIDE),
    ("lu_unpack.default", FACTORS, PIVOTS),
    ("linalg_lu_solve.default", FACTORS, PIVOTS, WIDE),
    ("ormqr.default", REFLECTIONS, TAU, TALL, True, True),
    ("ormqr.default", REFLECTIONS, TAU, TALL.T.contiguous(), False, False),
    ("segment_reduce.default", TALL[:3].clone(), "max"),
    ("segment_reduce.default", TALL[:3].clone(), "mean"),
    ("segment_reduce.default", TALL[:3].clone(), "sum"),
    ("histogram.bin_ct", TALL, 4),
    ("histogram.bins_tensor", TALL, torch.tensor([-1.0, 0.0, 0.5, 1.0])),
    ("fractional_max_pool2d.default", IMAGE, [2, 2], [2, 3], SHIFTS),
    ("fractional_max_pool3d.default", IMAGE, [1, 2, 2], [2, 2, 2], SHIFTS[:1, :2].repeat(1, 1, 2)[..., :3]),
    ("max_pool2d_with_indices_backward.default", POOLED, IMAGE, [2, 2], [2, 2], [0, 0], [1, 1], False, PLACES),
    ("narrow_copy.default", TALL, 0, 1, 2),
    ("view_copy.default", TALL, [3, 4]),
    ("view_copy.dtype", TALL, torch.int32),
    ("permute_copy.default", IMAGE, [3, 0, 2, 1]),
    ("unbind_copy.int", IMAGE, 1),
    ("_conj_physical.default", torch.complex(TALL, TALL)),
    ("nanmedian.dim", TALL, 0),
    ("_batch_norm_with_update_functional.default", IMAGE, *RUNNING, 0.1, 1e-3),
    ("linalg_eig.default", SYMMETRIC),
]
OPTIONS = {
    "segment_reduce.default": {"lengths": LENGTHS, "axis": 0, "unsafe": False},
    "linalg_lu_solve.default": {"left": True, "adjoint": True},
}
NO_GRADIENT = {
    "_batch_norm_with_update_functional.default",
    "histogram.bin_ct",
    "histogram.bins_tensor",
    "ormqr.default",
    "linalg_eig.default",
}


@pytest.mark.parametrize("case", FURTHER, ids=lambda case: case[0].replace(".", "_"))
def test_equals_torch(case):
    name, *arguments = case
    fixed = tuple(a for a in arguments if isinstance(a, torch.Tensor) and "fractional" in name and a is not IMAGE)
    outputs = {"_batch_norm_with_update_functional.default": 1, "linalg_eig.default": 1}.get(name)
    check(f"aten.{name}", Case(tuple(arguments), OPTIONS.get(name, {}), name not in NO_GRADIENT, outputs, 8, fixed))


class Spectrum(torch.nn.Module):
    """What does not depend on the length and the phase of eigenvectors."""

    def forward(self, x):
        values, vectors = torch.linalg.eig(x)
        return (values**2).sum().real, (vectors.abs() ** 2).sum(-1), torch.linalg.eigvals(x @ x).abs().sum()


def test_eigenvalues_and_vectors_have_torchs_gradients():
    x = SQUARE[0].clone().requires_grad_()
    first, second, third = Spectrum()(x)
    (first + (second * torch.arange(3)).sum() + third).backward()
    model = from_torch(Spectrum(), SQUARE[0], ["evaluation"])

    def loss(x):
        first, second, third = model(x)
        return first + (second * jnp.arange(3)).sum() + third

    np.testing.assert_allclose(jax.grad(loss)(SQUARE[0].numpy()), x.grad, rtol=1e-3, atol=1e-4)
