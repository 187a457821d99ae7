"""Ids beyond 32 bits, as hashes of users are: torch takes what JAX's integers do not hold."""

import pytest
import torch
from torch import nn

import jaxtrain
from tests.e2e.loops import assert_same, torch_step
from torch_bridge.capture.module_call import compiled_calls

IDS = torch.arange(32) * 1_234_567_890_123 + 5


class Hashed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(97, 4), nn.Linear(4, 1)

    def forward(self, ids):
        return self.head(torch.tanh(self.table(ids % 97)))


def loss_fn(module, ids):
    return module(ids).square().mean()


def trained(step_of):
    module = Hashed()
    step = step_of(module, torch.optim.SGD(module.parameters(), 0.1))
    losses = [float(step(ids)) for ids in IDS.split(8)]
    if hasattr(step, "sync"):
        step.sync()
    return module, losses


@pytest.mark.parametrize("how", ["a compiled step", "a compiled module"])
def test_a_loop_with_hashed_ids_is_torchs(how):
    theirs, wanted = trained(lambda module, optimizer: torch_step(module, optimizer, loss_fn))
    if how == "a compiled step":
        ours, losses = trained(lambda module, optimizer: jaxtrain.compile(module, loss_fn, optimizer))
    else:
        module = Hashed()
        step = torch_step(module, torch.optim.SGD(module.parameters(), 0.1), loss_fn)
        with compiled_calls(module):
            ours, losses = module, [step(ids) for ids in IDS.split(8)]
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert_same(theirs, ours)
