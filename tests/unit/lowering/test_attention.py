"""A converted module's attention where the device has a fused kernel; here jax's plain formula stands for it."""

from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.nn import fused_attention
from torch_bridge.lowering.operators.attention import scaled_dot_product_attention


def plain(q, k, v, *, bias, causal, window, scale):
    return jax.nn.dot_product_attention(q, k, v, bias, is_causal=causal, scale=scale, implementation="xla")


@pytest.mark.parametrize("blind", [-np.inf, -1e38, None], ids=["minus_infinity", "hugging_face", "mask"])
def test_the_kernel_hides_what_the_formula_hides(blind, monkeypatch):
    """Keys of the second sample, and all that its last query could see."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 4, 64, 16)), jnp.bfloat16) for _ in range(3))
    mask = np.ones((2, 1, 64, 64), bool)
    mask[1, :, :, 40:] = False
    mask[1, :, -1] = blind == -1e38  # in the formula a bias of large numbers leaves a mean
    given = mask if blind is None else np.where(mask, 0, blind).astype(np.float32)
    formula = scaled_dot_product_attention(None, q, k, v, given)
    kernel = Mock(wraps=plain)
    monkeypatch.setattr(fused_attention, "_kernel", kernel)
    with fused_attention.planned_for((9, 0)):
        fused = scaled_dot_product_attention(None, q, k, v, given)
    assert kernel.call_count == 1
    difference = np.asarray(fused - formula, np.float32)
    assert np.linalg.norm(difference) < 1e-2 * np.linalg.norm(np.asarray(formula, np.float32))
