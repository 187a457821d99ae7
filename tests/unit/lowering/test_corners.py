"""At corners, ties, poles and zeros the gradient is torch's, and nothing is NaN that is a number there."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.unit.lowering.compare import Case, check
from torch_bridge.lowering.operators import TABLE
from torch_bridge.lowering.table import Call

ZEROS, ONES = torch.zeros(2, 3), torch.ones(2, 3)
ROUND = torch.tensor([[0.0, 1.0, -1.0, 0.0], [2.0, 2.0, 2.0, 2.0], [-1.0, 0.0, 1.0, 1.0]])
PLACES = torch.tensor([[0, 0, 1], [1, 1, 1]])
EDGES = torch.tensor([[-1.0, -1.0], [1.0, 1.0], [1.0, -0.3], [0.0, 0.4]]).reshape(1, 2, 2, 2)

CORNERS = [
    ("abs.default", ZEROS),
    ("abs.default", torch.zeros(3, dtype=torch.complex64)),
    ("sgn.default", torch.complex(ROUND, ROUND.flip(0))),
    ("acosh.default", torch.complex(ROUND + 0.3, ROUND.flip(0) - 0.4)),
    ("pow.Tensor_Scalar", torch.complex(ROUND, ROUND.flip(0) + 0.5), 1.5 - 0.5j),
    ("l1_loss.default", ONES, ONES.clone(), 0),
    ("smooth_l1_loss.default", ONES, ONES.clone(), 0, 1.0),
    ("atan2.default", ZEROS, ZEROS.clone()),
    ("angle.default", ROUND),
    ("special_log_ndtr.default", torch.tensor([-20.0, -5.5, -1.0, 0.0, 1.0, 5.0, 9.0, 30.0])),
    ("multilabel_margin_loss_forward.default", ROUND, torch.tensor([[0, -1, 1, 0], [1, 2, -1, 0], [3, 0, 1, 2]]), 0),
    ("polar.default", ZEROS, ONES),
    ("copysign.Tensor", ZEROS, -ONES),
    ("fmax.default", ROUND, ROUND.clone()),
    ("fmin.default", ROUND, ROUND.clone()),
    ("nextafter.default", ROUND, ROUND.clone()),
    ("nextafter.default", ROUND, ROUND + 1),
    ("pow.Tensor_Tensor", ZEROS, ONES * 0.0),
    ("pow.Tensor_Tensor", ZEROS, ONES * 1.5),
    ("pow.Scalar", 0, ONES),
    ("xlogy.Tensor", ZEROS, ZEROS.clone() + 1),
    ("i0.default", ROUND),
    ("special_i0e.default", ROUND),
    ("special_i1.default", ROUND),
    ("special_i1e.default", ROUND),
    ("binary_cross_entropy.default", torch.tensor([1.0, 0.3, 0.0]), torch.tensor([1.0, 1.0, 0.0]), None, 0),
    ("std.correction", ROUND, [1]),
    ("std_mean.correction", ROUND, [1]),
    ("var.correction", torch.complex(ROUND, ROUND.flip(0)), [1]),
    ("amax.default", ROUND, [1]),
    ("clamp.Tensor", ROUND, ZEROS.new_zeros(3, 4), torch.tensor([0.0, 1.0, -1.0, 2.0])),
    ("median.default", ROUND),
    ("median.default", torch.tensor([1.0, math.nan, 0.0])),
    ("nanmedian.default", torch.tensor([1.0, math.nan, 1.0])),
    ("linalg_vector_norm.default", ZEROS, 2, [1]),
    ("linalg_vector_norm.default", ZEROS, 1, [1]),
    ("linalg_vector_norm.default", ZEROS, 0.5, [1]),
    ("linalg_vector_norm.default", ZEROS, 1.5, [1]),
    ("linalg_vector_norm.default", ZEROS, 4, [1]),
    ("linalg_vector_norm.default", ROUND, math.inf, [1]),
    ("linalg_vector_norm.default", ROUND, -math.inf, [1]),
    ("_cdist_forward.default", ROUND, ROUND.clone(), 1.0, None),
    ("_cdist_forward.default", ROUND, ROUND.clone(), 2.0, None),
    ("_cdist_forward.default", ROUND, ROUND.flip(0), math.inf, None),
    ("_pdist_forward.default", ROUND, 1.0),
    ("_safe_softmax.default", torch.tensor([[-math.inf, -math.inf], [0.0, -math.inf]]), -1),
    ("linalg_pinv.atol_rtol_tensor", torch.zeros(3, 2)),
    ("linalg_pinv.atol_rtol_tensor", torch.tensor([[1.0, 2.0], [2.0, 4.0], [0.0, 0.0]])),
    ("linalg_pinv.atol_rtol_tensor", torch.zeros(0, 3)),
    ("_linalg_det.default", torch.zeros(2, 0, 0)),
    ("_linalg_slogdet.default", torch.zeros(2, 0, 0)),
    ("scatter_reduce.two", ROUND, 0, PLACES, ZEROS, "prod"),
    ("scatter_reduce.two", ROUND, 0, PLACES, torch.tensor([[0.0, 2, 0], [3, 0, 1]]), "prod"),
    ("scatter_reduce.two", ZEROS, 0, PLACES, ZEROS.clone(), "amax"),
    ("scatter_reduce.two", ZEROS, 0, PLACES, ZEROS.clone(), "amin"),
    ("max_unpool2d.default", torch.rand(1, 2, 2), torch.zeros(1, 2, 2, dtype=torch.int64), [3, 3]),
    (
        "max_unpool3d.default",
        torch.rand(1, 1, 2, 2),
        torch.tensor([[[[0, 5], [0, 5]]]]),
        [1, 3, 3],
        [1, 1, 1],
        [0, 0, 0],
    ),
    ("grid_sampler_2d.default", torch.rand(1, 2, 3, 3), EDGES, 0, 1, True),
    ("grid_sampler_2d.default", torch.rand(1, 2, 3, 3), EDGES, 0, 1, False),
    ("grid_sampler_2d.default", torch.rand(1, 2, 3, 3), EDGES, 0, 2, True),
    ("grid_sampler_2d.default", torch.rand(1, 2, 3, 3), EDGES, 0, 2, False),
    ("special_xlog1py.default", ZEROS, ONES),
    ("special_xlog1py.default", ZEROS, -ONES),
    ("special_xlog1py.other_scalar", ZEROS, 1.0),
    ("special_xlog1py.self_scalar", 0.0, ONES),
    ("special_entr.default", torch.tensor([0.0, 1.0, 0.5])),
    ("logit.default", torch.tensor([0.0, 1.0, 0.5])),
    ("logit.default", torch.tensor([0.0, 1.0, 0.5, 0.01, 0.99]), 0.1),
    ("hypot.default", ZEROS, ZEROS.clone()),
    ("logaddexp.default", torch.tensor([-math.inf, 0.0, 2.0]), torch.tensor([0.0, 0.0, -math.inf])),
    ("multi_margin_loss.default", ROUND, torch.tensor([1, 0, 2])),
    ("multi_margin_loss.default", ROUND, torch.tensor([1, 0, 2]), 2, 0.5, None, 0),
    ("softshrink.default", torch.tensor([math.nan, 0.5, -0.5, 1.0])),
    ("clamp.default", torch.tensor([math.nan, 1.0, 0.0]), 0.0, 2.0),
    ("cummax.default", torch.tensor([1.0, math.nan, 2.0, math.nan]), 0),
    ("cummin.default", torch.tensor([1.0, math.nan, 0.0, math.nan]), 0),
    ("im2col.default", torch.zeros(0, 1, 5, 5), [2, 2], [1, 1], [0, 0], [1, 1]),
]
NUMBER, ONE = torch.tensor(2.0), torch.tensor(0)
ZERO_DIMENSIONAL = [
    ("index_add.default", NUMBER, 0, ONE, torch.tensor(3.0)),
    ("index_copy.default", NUMBER, 0, ONE, torch.tensor(3.0)),
    ("index_fill.int_Scalar", NUMBER, 0, ONE, 5.0),
    ("index_reduce.default", NUMBER, 0, ONE, torch.tensor(3.0), "prod"),
    ("scatter_reduce.two", NUMBER, 0, ONE, torch.tensor(3.0), "amax"),
    ("cummax.default", NUMBER, 0),
    ("cummin.default", NUMBER, -1),
    ("logcumsumexp.default", NUMBER, 0),
    ("median.dim", NUMBER, 0),
    ("nanmedian.dim", NUMBER, 0),
    ("meshgrid.indexing", [NUMBER, torch.arange(3.0)]),
    ("unfold.default", NUMBER, 0, 1, 1),
    ("kthvalue.default", NUMBER, 1, 0),
    ("topk.default", NUMBER, 1, 0),
    ("argsort.default", NUMBER, 0),
    ("flip.default", NUMBER, [0]),
    ("scatter_add.default", NUMBER, 0, torch.tensor(0), torch.tensor(3.0)),
    ("nonzero_static.default", NUMBER),
]
MASK = torch.tensor([True, False, True])
MASKED = [
    ("index_put.default", ROUND, [MASK], torch.rand(2, 4)),
    ("index_put.default", ROUND, [MASK], torch.rand(1, 4), True),
    ("index_put.default", ROUND, [None, torch.tensor([True, False, True, True])], torch.rand(3, 3)),
    ("index_put.default", ROUND, [ROUND > 0], torch.rand(int((ROUND > 0).sum()))),
    ("index_put.default", ROUND, [ROUND > 0], torch.rand(())),
]
TWICE = torch.tensor([0, 2, 0])
WRITTEN_TWICE = [
    ("index_put.default", ROUND, [TWICE], torch.rand(3, 4)),
    ("index_put.default", ROUND, [None, TWICE], torch.rand(3)),
    ("index_copy.default", ROUND, 0, TWICE, torch.rand(3, 4)),
    ("scatter.src", ROUND, 1, TWICE[None], torch.rand(1, 3)),
]


def _name(case) -> str:
    return case[0].replace(".", "_")


@pytest.mark.parametrize("case", CORNERS, ids=_name)
def test_the_gradient_is_torchs_at(case):
    outputs = 1 if case[0].startswith(("_linalg_det",)) else 2 if case[0].startswith("_linalg_slogdet") else None
    check(f"aten.{case[0]}", Case(case[1:], outputs=outputs))


@pytest.mark.parametrize("case", ZERO_DIMENSIONAL, ids=_name)
def test_a_tensor_without_axes_is_taken_by(case):
    options = {"size": 1} if "static" in case[0] else {"indexing": "ij"} if "meshgrid" in case[0] else {}
    check(f"aten.{case[0]}", Case(case[1:], options))


@pytest.mark.parametrize("case", MASKED, ids=_name)
def test_a_mask_is_written_through_by(case):
    check(f"aten.{case[0]}", Case(case[1:]))


@pytest.mark.parametrize("case", WRITTEN_TWICE, ids=_name)
def test_the_gradient_of_a_place_written_twice_goes_to_both_sources_in(case):
    check(f"aten.{case[0]}", Case(case[1:]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_a_float_beyond_small_integers_keeps_its_lowest_bits_as(dtype):
    x = torch.tensor([255.9, 256.0, 300.0, -1.0, -3.7, 70000.0, math.nan, math.inf])
    check("aten._to_copy.default", Case((x,), {"dtype": dtype}, gradient=False))


def test_the_mean_of_nothing_but_nan_has_torchs_gradient():
    x = torch.tensor([[1.0, math.nan, math.nan], [2.0, 3.0, math.nan]], requires_grad=True)
    x.nanmean(0).sum().backward()
    known = np.isfinite(x.detach().numpy()).sum(0)
    mean = lambda x: TABLE["aten.nansum.default"](Call(None), x, [0]) / known
    slopes = jax.grad(lambda x: mean(x).sum())(jnp.asarray(x.detach().numpy()))
    np.testing.assert_array_equal(slopes, x.grad)
    assert np.isnan(slopes[0, 2])
