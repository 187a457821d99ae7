"""A buffer that a forward assigns anew, as in `self.mean = ...`, stays part of the same program."""

import copy

import torch
from torch import nn

import jaxtrain


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.calls = self.calls + 1
        return self.linear(x - self.mean)


def test_assigned_buffers_and_those_before_have_torchs_values_in_one_program():
    torch.manual_seed(0)
    module, draw = Centred(), torch.Generator().manual_seed(0)
    twin, loss = copy.deepcopy(module), lambda module, batch: module(batch).pow(2).mean()
    optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    step = jaxtrain.compile(module, loss, torch.optim.SGD(module.parameters(), 0.1))
    for number in range(6):
        if number == 3:
            before = module.mean, twin.mean  # whoever holds it reads the value of then
        batch = torch.randn(8, 3, generator=draw)
        optimizer.zero_grad()
        loss(twin, batch).backward()
        optimizer.step()
        step(batch)
    assert len(step.programs) == len(step.capture.graphs) == 1
    torch.testing.assert_close(*before)
    for ours, theirs in zip(module.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs)
