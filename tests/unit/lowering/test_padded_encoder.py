"""torch.nn.TransformerEncoder gives zeros at padding where torch's nested tensors do: without gradients, in eval()."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxtrain
from torch_bridge.capture.module_call import compile_calls
from torch_bridge.from_torch import from_torch

X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([[5], [3], [1]])
TRAILING = torch.arange(5) >= LENGTHS


class Encoder(torch.nn.Module):
    def __init__(self, norm: bool = False):
        super().__init__()
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 1, norm=torch.nn.LayerNorm(8) if norm else None)

    def forward(self, x, padding):
        return self.encoder(x, src_key_padding_mask=padding)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("padding", [TRAILING, TRAILING.flip(1)], ids=["trailing", "leading"])
def test_an_evaluation_is_that_of_torch_without_gradients(norm, padding):
    module = Encoder(norm).eval()
    with torch.no_grad():
        expected = module(X, padding)
    found = from_torch(module, (X, padding), modes=("evaluation",))(jnp.asarray(X), jnp.asarray(padding))
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_a_frozen_encoder_in_eval_feeds_zeros_to_what_trains():
    found = []
    for compiled in (False, True):
        head, encoder = torch.nn.Linear(8, 1), Encoder().requires_grad_(False).eval()
        torch.nn.init.ones_(head.weight)
        torch.nn.init.zeros_(head.bias)
        optimizer = torch.optim.SGD(head.parameters(), 0.1)
        module = torch.nn.ModuleDict({"encoder": encoder, "head": head})
        loss = lambda module, batch: (module["head"](module["encoder"](*batch)) - 1).square().mean()
        if compiled:
            step = jaxtrain.compile(module, loss, optimizer)
            step((X, TRAILING))
            step.sync()
        else:
            loss(module, (X, TRAILING)).backward()
            optimizer.step()
        found.append(head.weight.detach().numpy())
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


@pytest.mark.parametrize("padding", [TRAILING, TRAILING.flip(1)], ids=["trailing", "leading"])
def test_a_compiled_module_gives_torchs_zeros_in_evaluation(padding):
    module = Encoder().eval()
    with torch.no_grad():
        expected = module(X, padding)
    compile_calls([module])
    with torch.no_grad():
        np.testing.assert_allclose(module(X, padding), expected, atol=2e-6)
