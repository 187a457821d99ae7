"""Losses that select rows by values are one captured program, with torch's losses and weights."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import jaxtrain


def batches():
    """Rows of several sizes; of one batch every row is selected, of another a single one, of a third none."""
    draw = torch.Generator().manual_seed(1)
    labels = [torch.randint(0, 4, (8,), generator=draw) for _ in range(4)]
    labels[1][:], labels[2][:], labels[3][:] = 3, 0, 0
    labels[2][0] = 3
    return [(torch.randn(8, 3, generator=draw), label) for label in labels]


def with_values(module, batch):
    out, chosen = module(batch[0]), batch[1] > 0
    right = (out[chosen].argmax(1) == batch[1][chosen]).float().mean()
    return F.mse_loss(out[chosen], torch.ones_like(out[chosen])), {"rows": chosen.sum(), "right": right}


def mean_by_count(module, batch):
    chosen = batch[1] > 0
    return module(batch[0])[chosen].sum() / max(1, int(chosen.sum()))


def joined(module, batch):
    out = module(batch[0])
    return torch.cat([out[batch[1] > 0], out[batch[1] < 3]]).pow(2).mean()


def hard_negatives(module, batch):
    losses, chosen = F.cross_entropy(module(batch[0]), batch[1], reduction="none"), batch[1] > 0
    return losses[chosen].sum() + losses[~chosen].sort(descending=True).values[:2].sum()


def by_class(module, batch):
    out = module(batch[0])
    return sum(out[batch[1] == label].pow(2).sum() for label in range(4)) / len(out)


def counted(module, batch):
    labels, inverse = torch.unique(batch[1], return_inverse=True)
    return (module(batch[0])[:, 0] * inverse).sum() / labels.numel()


LOSSES = {
    "cross entropy": lambda m, b: F.cross_entropy(m(b[0])[b[1] > 0], b[1][b[1] > 0]),
    "masked_select": lambda m, b: torch.masked_select(out := m(b[0]), out > 0).sum() / 10,
    "nonzero": lambda m, b: m(b[0])[(b[1] > 0).nonzero(as_tuple=True)[0]].pow(2).sum(),
    "a layer on rows": lambda m, b: m(b[0][b[1] > 0]).pow(2).mean(),
    "rows and their labels": lambda m, b: m(b[0])[mask := b[1] > 0, b[1][mask]].sum(),
    "similarities": lambda m, b: (rows := F.normalize(m(b[0])[b[1] > 0], dim=1)).mm(rows.t()).pow(2).sum(),
    "a matrix as mask": lambda m, b: m(b[0])[b[1][:, None] > torch.arange(4)].pow(2).sum(),
    "the first two": lambda m, b: m(b[0])[b[1] > 0][:2].pow(2).sum(),
    "values to log": with_values,
    "a mean by a count": mean_by_count,
    "two joined": joined,
    "hard negatives": hard_negatives,
    "by class": by_class,
    "unique": counted,
}


@pytest.mark.parametrize("name", LOSSES)
def test_selected_rows_are_one_program_with_torchs_numbers(name):
    torch.manual_seed(0)
    module, loss = nn.Linear(3, 4), LOSSES[name]
    twin = copy.deepcopy(module)
    step = jaxtrain.compile(module, loss, torch.optim.SGD(module.parameters(), 0.05, momentum=0.9))
    optimizer = torch.optim.SGD(twin.parameters(), 0.05, momentum=0.9)
    for batch in batches():
        optimizer.zero_grad()
        found = loss(twin, batch)
        want, logged = found if isinstance(found, tuple) else (found, {})
        want.backward()
        optimizer.step()
        got = step(batch)
        got, shown = got if isinstance(got, tuple) else (got, {})
        torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-5, atol=1e-6, equal_nan=True)
        for key, value in logged.items():
            torch.testing.assert_close(float(shown[key]), float(value), equal_nan=True)
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert len(step.capture.graphs) == len(step.programs) == 1
