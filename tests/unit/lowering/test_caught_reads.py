"""A loss that reads values in a try, and catches what a record raises there, is left to torch."""

import numpy as np
import pytest
import torch
from torch import nn

import jaxtrain


def _caught(compute):
    try:
        return compute()
    except Exception:
        return 0.5


READS = {
    "float": lambda x: float(x.sum()) / 100,
    "branch": lambda x: 2.0 if x.sum() > 12 else 1.0,
    "array": lambda x: float(np.sqrt(x).sum()) / 100,
    "numpy": lambda x: float(x.numpy().sum()) / 100,
    "a size that depends on values": lambda x: float(len(x[x > 1.5])),
    "a branch on such a size": lambda x: 2.0 if x[x > 1.5].shape[0] > 0 else 1.0,
}


@pytest.mark.parametrize("read", READS)
def test_a_read_whose_error_is_caught_counts_as_in_torch(read):
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    loss_fn = lambda module, x: module(x).square().mean() * _caught(lambda: READS[read](x))
    step = jaxtrain.compile(module, loss_fn, torch.optim.SGD(module.parameters(), lr=0.0))
    for scale in (1, 2, 3):
        x = torch.ones(4, 3) * scale
        assert float(step(x)) == pytest.approx(float(loss_fn(module, x).detach()), rel=1e-6)
    assert step.torch is not None
