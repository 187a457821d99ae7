"""Convolutions spelt out for the CPU give what jax.lax gives, and so do their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.nn import correlation_forms as forms
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
    "small map": ((1, 1), ((3, 3), (2, 3)), (1, 1), (4, 5), (3, 2)),
    "by its kernel": ((2, 2), ((0, 0), (0, 0)), (1, 1), (1, 1), (2, 2)),
    "cut": ((1, 1), ((-1, -2), (0, 1)), (1, 1), (1, 1), (3, 2)),
    "transposed and cut": ((1, 1), ((-1, 1), (1, -1)), (2, 2), (1, 1), (2, 2)),
    "transposed and strided": ((2, 1), ((2, 3), (1, 1)), (2, 3), (1, 1), (3, 2)),
    "long stride": ((4, 3), ((1, 0), (1, 0)), (1, 1), (2, 1), (2, 2)),
    "transposed volume": ((1, 1, 1), ((1, 1), (2, 2), (1, 2)), (2, 1, 2), (1, 1, 1), (2, 3, 2)),
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
        np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=max(2e-5, 1e-6 * float(jnp.abs(wanted).max())))


FORMS = {  # every form on one shape, that the rule takes it for or not
    "output": (forms.output, forms.OUTPUT_FORMS),
    "input": (forms.input_gradient, forms.INPUT_FORMS),
    "kernel": (forms.kernel_gradient, forms.KERNEL_FORMS),
}
POINTWISE = ("pointwise", "samples")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", [(name, form) for name, (_, table) in FORMS.items() for form in table])
def test_every_form_gives_the_sums_of_xlas_convolution(form, dtype):
    side, form = form
    kernel = (1, 1) if form in POINTWISE else (3, 2)
    window = forms.Window((2, 1), ((1, 1), (0, 2)), (1, 2))
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((4, 5, 9, 8), np.float32), dtype)
    weight = jnp.asarray(rng.standard_normal((6, 5, *kernel), np.float32), dtype)
    exact = lambda x, w: jax.lax.conv_general_dilated(x, w, window.stride, window.pads, None, window.dilation)
    y, gradients = jax.vjp(exact, x.astype(jnp.float32), weight.astype(jnp.float32))
    dy = jnp.asarray(rng.standard_normal(y.shape, np.float32), dtype)
    dx, dw = gradients(dy.astype(jnp.float32))
    arguments = {
        "output": (x, weight, window),
        "input": (dy, weight, window, (9, 8)),
        "kernel": (x, dy, window, kernel),
    }
    found = FORMS[side][0](*arguments[side], form=form)
    wanted = {"output": y, "input": dx, "kernel": dw}[side]
    assert found.dtype == dtype
    scale = float(jnp.abs(wanted).max())
    np.testing.assert_allclose(found.astype(jnp.float32), wanted, atol=scale * (1e-6 if dtype == jnp.float32 else 8e-3))


@pytest.mark.parametrize("name", ["strided", "transposed", "small map", "pointwise", "length"])
def test_second_derivatives_equal_jaxs_own_to_1e_4(name):
    stride, pads, gaps, dilation, kernel = CASES[name]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 9, 8)[: 2 + len(kernel)], np.float32)
    weight = rng.standard_normal((4, 3, *kernel), np.float32)

    def penalty(function):
        inner = jax.grad(lambda x, w: (function(x, w, stride, pads, gaps, dilation) ** 3).sum(), (0, 1))
        return jax.grad(lambda x, w: sum((part**2).sum() for part in inner(x, w)), (0, 1))

    for ours, wanted in zip(
        penalty(correlate)(x, weight), penalty(jax.lax.conv_general_dilated)(x, weight), strict=True
    ):
        np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-4 * float(jnp.abs(wanted).max()))


def test_a_gpu_gets_one_convolution_for_the_output_and_one_for_each_gradient():
    x, weight = jnp.zeros((8, 256, 4, 4)), jnp.zeros((256, 256, 3, 3))
    loss = lambda x, w: correlate(x, w, (2, 2), ((1, 1), (1, 1))).sum()
    lowered = jax.jit(jax.grad(loss, (0, 1))).trace(x, weight).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("stablehlo.convolution") == 2  # the sum needs no output
    assert "dot_general" not in lowered


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
        np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=max(2e-5, 1e-6 * float(jnp.abs(wanted).max())))
