"""Operators that torch's autograd puts into graphs, compared with torch's own on the same arguments."""

import jax.numpy as jnp
import pytest
import torch
from torch.utils import _pytree as pytree

from torch_bridge.capture import attention, replay  # noqa: F401  (they register torch_bridge's operators)
from torch_bridge.lowering.operators import TABLE
from torch_bridge.lowering.table import Call

aten, ours = torch.ops.aten, torch.ops.torch_bridge


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


def _pooled(forward, backward, x, *options):
    """A case of a pooling's backward: (operator, slope, x, *options, indices)."""
    y, indices = forward(x, *options)
    return backward, draw(*y.shape), x, *options, indices


def _flash(causal):
    q, k, v = (draw(2, 3, 5, 4) + i for i in range(3))
    y, sums = aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, causal)
    return (
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        draw(*y.shape),
        q,
        k,
        v,
        y,
        sums,
        0.0,
        causal,
    )


def _attention(mask):
    return draw(2, 3, 5, 4), draw(2, 3, 5, 4), draw(2, 3, 5, 4), draw(2, 3, 5, 4) * 2, mask, False, None, False


def _weight_norm(dim):
    v, g = draw(4, 3) + 1, draw(4, 1) if dim == 0 else draw(1, 3)
    return v, g, aten._weight_norm_interface.default(v, g, dim)[1], dim


IMAGE, VOLUME, GRID = draw(2, 3, 8, 8), draw(2, 3, 6, 6, 6), torch.tanh(draw(2, 4, 4, 2))
CONVOLUTION = [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]
ROWS = draw(4, 6)
CASES = [
    (aten._weight_norm_interface_backward.default, draw(4, 3), *_weight_norm(0)),
    (aten._weight_norm_interface_backward.default, draw(4, 3), *_weight_norm(1)),
    (aten.convolution_backward.default, draw(2, 5, 8, 8), IMAGE, draw(5, 3, 3, 3), [5], *CONVOLUTION),
    (aten.avg_pool2d_backward.default, draw(2, 3, 4, 4), IMAGE, [2, 2], [2, 2], [0, 0], False, True, None),
    (aten.avg_pool3d_backward.default, draw(2, 3, 3, 3, 3), VOLUME, [2] * 3, [2] * 3, [0] * 3, False, True, None),
    (aten._adaptive_avg_pool2d_backward.default, draw(2, 3, 3, 3), IMAGE),
    (aten._adaptive_avg_pool3d_backward.default, draw(2, 3, 4, 4, 4), VOLUME),
    _pooled(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool2d_backward.default, IMAGE, [3, 3])[:3]
    + _pooled(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool2d_backward.default, IMAGE, [3, 3])[4:],
    _pooled(aten.adaptive_max_pool3d.default, aten.adaptive_max_pool3d_backward.default, VOLUME, [2, 2, 2])[:3]
    + _pooled(aten.adaptive_max_pool3d.default, aten.adaptive_max_pool3d_backward.default, VOLUME, [2, 2, 2])[4:],
    _pooled(
        aten.max_pool3d_with_indices.default,
        aten.max_pool3d_with_indices_backward.default,
        VOLUME,
        [3] * 3,
        [2] * 3,
        [1] * 3,
        [1] * 3,
        False,
    ),
    (aten.grid_sampler_2d_backward.default, draw(2, 3, 4, 4), IMAGE, GRID, 0, 0, False, [True, True]),
    (
        aten.grid_sampler_3d_backward.default,
        draw(2, 3, 2, 2, 2),
        VOLUME,
        torch.tanh(draw(2, 2, 2, 2, 3)),
        0,
        0,
        False,
        [True, True],
    ),
    (aten._cdist_backward.default, draw(4, 3), ROWS, ROWS[:3] + 1, 2.0, torch.cdist(ROWS, ROWS[:3] + 1)),
    (aten.rrelu_with_noise_backward.default, ROWS, ROWS + 1, ROWS.abs(), 0.1, 0.3, True, False),
    (aten.rrelu_with_noise_backward.default, ROWS, ROWS + 1, ROWS.abs(), 0.1, 0.3, False, False),
    (aten._fused_rms_norm.default, ROWS, [6], draw(6), 1e-5),
    (torch.ops.prims.convert_element_type.default, ROWS * 3, torch.int32),
    (aten.true_divide.Tensor, ROWS, ROWS + 3),
    (aten.true_divide.Scalar, ROWS, 3),
    (aten.as_strided_scatter.default, ROWS, draw(2, 3), [2, 3], [6, 2], 1),
    (aten._scaled_dot_product_flash_attention_for_cpu.default, *(draw(2, 3, 5, 4) + i for i in range(3)), 0.0, True),
    _flash(True),
    _flash(False),
    (ours.after.default, [draw(3), draw(2, 2)], [draw(4)]),
    (ours.attention.default, *_attention(None)[1:]),
    (ours.attention_backward.default, *_attention(draw(5, 5)), True),
    (ours.attention_backward.default, *_attention(draw(5, 5) > -1), False),
]
NAMES = {str(case[0]) for case in CASES} | {"prims.fma.default", "aten._fused_rms_norm_backward.default"}


def _in_jax(value):
    return jnp.array(value.numpy()) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0]))
def test_an_operator_of_a_backward_pass_is_torchs(case):
    operator, *arguments = case
    wanted = operator(*arguments)
    got = TABLE[str(operator)](Call(), *pytree.tree_map(_in_jax, arguments))
    several = isinstance(wanted, (tuple, list))
    for a, b in zip(wanted, got, strict=False) if several else ((wanted, got),):
        assert torch.allclose(torch.tensor(b.tolist(), dtype=a.dtype), a, rtol=1e-4, atol=1e-5)


def test_a_fused_multiplication_and_addition_of_compiled_optimizers():
    got = TABLE["prims.fma.default"](Call(), *map(_in_jax, (ROWS, ROWS + 1, ROWS * 2)))
    assert torch.allclose(torch.tensor(got.tolist()), ROWS * (ROWS + 1) + ROWS * 2)


def test_the_backward_pass_of_a_norm_that_has_no_kernel_on_a_cpu():
    x, weight = ROWS.clone().requires_grad_(), draw(6).requires_grad_()
    wanted = torch.autograd.grad(torch.nn.functional.rms_norm(x, (6,), weight, 1e-5), (x, weight), ROWS + 1)
    scales = (ROWS.square().mean(1, True) + 1e-5).rsqrt()
    given = (ROWS + 1, ROWS, [6], scales, weight.detach(), [True, True])
    got = TABLE["aten._fused_rms_norm_backward.default"](Call(), *pytree.tree_map(_in_jax, given))
    for a, b in zip(wanted, got, strict=True):
        assert torch.allclose(torch.tensor(b.tolist()), a, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_the_gradients_of_attention_in_torch_are_those_of_its_formula(causal):
    q, k, v = (draw(2, heads, 5, 4).add(heads).requires_grad_() for heads in (4, 2, 2))
    bias = None if causal else draw(5, 5).requires_grad_()
    options = {"is_causal": causal, "scale": 0.3, "enable_gqa": True}
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias, 0.0, **options)
    leaves = [q, k, v] if causal else [q, k, v, bias]
    slope = draw(2, 4, 5, 4)
    wanted = torch.autograd.grad(y, leaves, slope)
    with torch.no_grad():
        got = ours.attention_backward(slope, q, k, v, bias, causal, 0.3, True, not causal)
    for a, b in zip(wanted, got, strict=True):
        assert torch.allclose(b, a, atol=1e-5)
