"""One torch loop and its compiled counterpart, on a small network."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import jaxtrain

STEPS = 12


def net(*extra: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), *extra, nn.Tanh(), nn.Linear(8, 1))


def batches(steps: int = STEPS, rows: int = 8) -> list:
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(rows, 6, generator=draw), torch.randn(rows, 1, generator=draw)) for _ in range(steps)]


def mse(module, batch):
    return F.mse_loss(module(batch[0]), batch[1])


def torch_step(module, optimizer, loss_fn=mse, clip=None):
    def step(batch):
        optimizer.zero_grad()
        loss = loss_fn(module, batch)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        return loss.item()

    return step


def pair(make=net, optimizer=lambda module: torch.optim.AdamW(module.parameters(), 1e-2)):
    theirs, ours = make(), make()
    return (theirs, optimizer(theirs)), (ours, optimizer(ours))


def sgd(module):
    """For a bias before a BatchNorm: its gradient is rounding, which Adam would magnify."""
    return torch.optim.SGD(module.parameters(), 0.05, momentum=0.9)


def assert_same(theirs: nn.Module, ours: nn.Module, atol: float = 1e-5) -> None:
    for (name, want), got in zip(theirs.state_dict().items(), ours.state_dict().values(), strict=True):
        np.testing.assert_allclose(got.numpy(), want.numpy(), atol=atol, rtol=1e-4, err_msg=name)


def check(theirs, ours, loss_fn=mse, data=None, clip=None, **options) -> list[float]:
    (their_module, their_optimizer), (module, optimizer) = theirs, ours
    step = jaxtrain.compile(module, loss_fn, optimizer, clip_norm=clip, **options)
    plain = torch_step(their_module, their_optimizer, loss_fn, clip)
    losses = []
    for batch in data or batches():
        want, got = plain(batch), float(step(batch))
        assert got == pytest.approx(want, rel=1e-4, abs=1e-6)
        losses.append(got)
    step.sync()
    assert_same(their_module, module)
    return losses
