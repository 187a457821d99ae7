"""Checkpointed parts of a captured loss: they run twice, with the same random numbers, and refuse what differs."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import jaxtrain

X = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))


class Blocks(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
        self.options = {"use_reentrant": False} | options

    def block(self, x):
        return torch.relu(self.outer(checkpoint(self.part, x, **self.options)))

    def part(self, x):
        return torch.tanh(self.inner(x))

    def forward(self, x):
        for _ in range(3):
            x = checkpoint(self.block, x, **self.options)
        return x


def squares(module, x):
    return module(x).square().mean()


def compiled(module, rate=0.5):
    return jaxtrain.compile(module, squares, torch.optim.SGD(module.parameters(), rate))


def test_nested_checkpoints_have_torchs_losses_and_run_twice():
    theirs = Blocks()
    ours, optimizer = copy.deepcopy(theirs), torch.optim.SGD(theirs.parameters(), 0.5)
    step = compiled(ours)
    for _ in range(4):
        optimizer.zero_grad()
        loss = squares(theirs, X)
        loss.backward()
        optimizer.step()
        assert float(step(X)) == pytest.approx(float(loss.detach()), rel=1e-5)
    graph = step.capture.graphs[0].captured.program.module.graph
    names = [str(node.target) for node in graph.nodes]
    assert names.count("torch_bridge.after.default") == 3 + 3  # each block, and the part inside it once more
    assert names.count("aten.tanh.default") == 3 * 3  # in the forward pass, with its block, and alone


class Dropped(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.weight, self.options = nn.Parameter(torch.ones(64)), options

    def forward(self, x):
        return checkpoint(lambda x: nn.functional.dropout(self.weight * x, 0.5), x, use_reentrant=False, **self.options)


def test_dropout_drops_the_same_numbers_again():
    module = Dropped()
    step = compiled(module, rate=16.0)
    loss = float(step(torch.ones(64)))
    assert step.torch is None
    step.sync()
    changed = int((module.weight != 1).sum())
    assert loss == pytest.approx(4 * changed / 64)
    assert sorted(module.weight.detach().unique().tolist()) == [-1.0, 1.0]  # a gradient of 2 * 4 / 64 where kept


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Dropped(preserve_rng_state=False), "preserve_rng_state"),
        (nn.Sequential(nn.Linear(8, 8), Blocks(use_reentrant=True)), "use_reentrant"),
    ],
)
def test_what_torch_would_compute_otherwise_is_not_captured(module, why):
    step = compiled(module)
    step(torch.ones(64) if isinstance(module, Dropped) else X)
    assert why in step.explain()
