"""print() in a loss of jaxtrain.compile prints as in torch; a converted module leaves it out."""

import logging
import time

import jax
import numpy as np
import torch
from torch import nn

import jaxtrain
from torch_bridge.from_torch import from_torch


class Talks(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        y = self.linear(x)
        print("y is", y, y.argmax(-1), sep=" | ")
        print(f"mean {y.mean():.3f} of {tuple(y.shape)}; first {str(y[0])}")
        print("no tensor", x.shape[0], y.mean(), f"{x.shape[0]:>4}|{y.sum()}")
        return y


def make():
    torch.manual_seed(0)
    return Talks()


def test_a_converted_module_computes_without_its_prints_and_says_so(caplog, capfd):
    class Short(Talks):
        def forward(self, x):
            y = self.linear(x)
            print("y is", y, y.argmax(-1), sep=" | ")
            print(f"mean {y.mean():.3f} of {tuple(y.shape)}")
            print("no tensor", x.shape[0], y.mean().item())
            return y

    module, x = Short(), torch.arange(6.0).reshape(2, 3)
    with caplog.at_level(logging.WARNING):
        model = from_torch(module, x)
    assert sum("is left out" in line for line in caplog.messages) == 3
    capfd.readouterr()
    np.testing.assert_allclose(model(np.asarray(x)), module.linear(x).detach(), atol=1e-6)
    assert capfd.readouterr().out == ""


def test_a_compiled_step_prints_and_trains_alike(capfd):
    theirs, ours, x = make(), make(), torch.arange(6.0).reshape(2, 3)
    loss = lambda module, batch: module(batch).square().mean()
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1)
    step = jaxtrain.compile(ours, loss, torch.optim.SGD(ours.parameters(), 0.1))
    for _ in range(3):
        optimizer.zero_grad()
        loss(theirs, x).backward()
        optimizer.step()
    capfd.readouterr()
    for _ in range(3):
        step(x)
    step.sync()
    jax.effects_barrier()
    assert capfd.readouterr().out.count("no tensor 2 ") == 3
    np.testing.assert_allclose(ours.linear.weight.detach(), theirs.linear.weight.detach(), atol=1e-5)


def test_a_clock_that_is_printed_goes_on(capfd):
    def loss(module, batch):
        print("clock", time.perf_counter())
        return module(batch).square().mean()

    module, x = nn.Linear(3, 2), torch.ones(2, 3)
    step = jaxtrain.compile(module, loss, torch.optim.SGD(module.parameters(), 0.1))
    capfd.readouterr()
    for _ in range(3):
        step(x)
    step.sync()
    jax.effects_barrier()
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("clock")]
    assert len(set(lines)) == len(lines) == 3
