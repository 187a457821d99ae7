"""Whole encoder layers and multi-head attention, torch's single operators in evaluation, against torch."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from torch_bridge.lowering.operators import TABLE

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
MASKS = {
    "none": {},
    "padding": {"src_key_padding_mask": torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 1, 1]]).bool()},
    "causal": {"src_mask": torch.ones(5, 5).triu(1).bool()},
}
MASKS["both"] = MASKS["padding"] | MASKS["causal"]


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Keeps the last call of an operator with these letters in its name."""

    def __init__(self, name: str):
        super().__init__()
        self.name, self.call = name, None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if self.name in str(func):
            self.call = str(func), args, result
        return result


def assert_same(module, name, *inputs, **options):
    with torch.no_grad(), Calls(name) as seen:
        module(*inputs, **options)
    operator, args, expected = seen.call
    arrays = [jnp.asarray(a.numpy(force=True)) if isinstance(a, torch.Tensor) else a for a in args]
    found = TABLE[operator](None, *arrays)
    pairs = [(expected, found)] if isinstance(expected, torch.Tensor) else zip(expected, found, strict=True)
    for want, got in pairs:
        if want is None or not want.numel():
            assert got is None
        else:
            np.testing.assert_allclose(got, want.numpy(), atol=2e-6)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_layer_has_torchs_outputs(mask, norm_first, activation):
    torch.manual_seed(0)
    options = {"dropout": 0.1, "activation": activation, "norm_first": norm_first, "batch_first": True}
    module = torch.nn.TransformerEncoderLayer(8, 2, 16, **options).eval()
    assert_same(module, "_transformer_encoder_layer_fwd", X, **MASKS[mask])


@pytest.mark.parametrize(
    "options", [{}, {"need_weights": False}, {"average_attn_weights": False}], ids=["mean", "no weights", "weights"]
)
def test_attention_has_torchs_outputs_and_weights(options):
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    assert_same(module, "_native_multi_head_attention", X, X, X, **options)
