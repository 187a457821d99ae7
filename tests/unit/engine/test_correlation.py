"""Convolutions spelt out for the CPU give what jax.lax gives, and so do their gradients."""

import jax
import numpy as np
import pytest

from jaxtrain.nn.correlation import correlate

CASES = {  # stride, zeros before and after, gaps in the input, dilation of the kernel, kernel
    "plain": ((1, 1), ((0, 0), (0, 0)), (1, 1), (1, 1), (3, 2)),
    "strided": ((2, 3), ((1, 1), (0, 2)), (1, 1), (1, 1), (3, 3)),
    "dilated": ((1, 2), ((2, 2), (1, 0)), (1, 1), (2, 3), (3, 2)),
    "transposed": ((1, 1), ((2, 3), (1, 1)), (2, 3), (1, 1), (3, 2)),
    "one by one": ((2, 2), ((0, 0), (0, 0)), (1, 1), (1, 1), (1, 1)),
    "pointwise": ((1, 1), ((0, 0), (0, 0)), (1, 1), (1, 1), (1, 1)),
    "long": ((1,), ((9, 11),), (1,), (1,), (20,)),
    "transposed length": ((1,), ((3, 2),), (3,), (2,), (4,)),
    "length": ((2,), ((1, 2),), (1,), (2,), (3,)),
    "volume": ((2, 1, 1), ((1, 1), (0, 0), (2, 1)), (1, 1, 1), (1, 1, 2), (2, 3, 2)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_output_and_gradients_equal_jaxs_own_to_1e_5(case):
    stride, pads, gaps, dilation, kernel = case
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 9, 8, 7)[: 2 + len(kernel)], np.float32)
    weight = rng.standard_normal((4, 3, *kernel), np.float32)
    reference = lambda x, w: jax.lax.conv_general_dilated(x, w, stride, pads, gaps, dilation)
    y, gradients = jax.vjp(lambda x, w: correlate(x, w, stride, pads, gaps, dilation), x, weight)
    expected, theirs = jax.vjp(reference, x, weight)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    dy = rng.standard_normal(y.shape, np.float32)
    for ours, wanted in zip(gradients(dy), theirs(dy), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=2e-5)


def test_groups_keep_to_their_own_channels():
    x, weight = np.ones((1, 4, 5), np.float32), np.ones((2, 2, 1), np.float32)
    np.testing.assert_array_equal(correlate(x, weight, (1,), ((0, 0),), groups=2), np.full((1, 2, 5), 2.0))


@pytest.mark.parametrize(("groups", "outputs"), [(6, 6), (3, 6), (6, 12)], ids=["by tap", "one by one", "multiplied"])
def test_groups_and_their_gradients_equal_jaxs_own_to_1e_5(groups, outputs):
    shape = (2, 1), ((1, 0), (2, 1)), (1, 1), (1, 2)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 6, 9, 8), np.float32)
    weight = rng.standard_normal((outputs, 6 // groups, 3, 2), np.float32)
    reference = lambda x, w: jax.lax.conv_general_dilated(x, w, *shape, feature_group_count=groups)
    y, gradients = jax.vjp(lambda x, w: correlate(x, w, *shape, groups), x, weight)
    expected, theirs = jax.vjp(reference, x, weight)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    dy = rng.standard_normal(y.shape, np.float32)
    for ours, wanted in zip(gradients(dy), theirs(dy), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=2e-5)
