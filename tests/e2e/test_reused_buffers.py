"""Code that fills the same tensors with every batch, as torch allows: each batch keeps its values for its step."""

import copy

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils import data

import jaxtrain
from jaxtrain import Trainer, TrainingConfig

ROWS, WIDTH, STEPS = 64, 300, 8
X = torch.randn(ROWS * STEPS, WIDTH, generator=torch.Generator().manual_seed(0))
Y = X[:, :1] * 2


def network(hidden=64):
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, 1))


def loss_of(module, batch):
    return F.mse_loss(module(batch[0]), batch[1])


def in_torch(module):
    optimizer, losses = torch.optim.SGD(module.parameters(), 1e-2), []
    for x, y in zip(X.split(ROWS), Y.split(ROWS), strict=True):
        loss = loss_of(module, (x, y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Stream(data.IterableDataset):
    """Ready-made batches, all in the same two tensors."""

    def __iter__(self):
        x, y = torch.empty(ROWS, WIDTH), torch.empty(ROWS, 1)
        for i in range(STEPS):
            x.copy_(X[i * ROWS :][:ROWS])
            y.copy_(Y[i * ROWS :][:ROWS])
            yield x, y


def loader(kind):
    if kind == "stream":
        return data.DataLoader(Stream(), batch_size=None)
    x, y = torch.empty(ROWS, WIDTH), np.empty((ROWS, 1), np.float32)

    def collate(items):
        torch.stack([item[0] for item in items], out=x)
        np.stack([item[1] for item in items], out=y)
        return x, y

    return data.DataLoader(data.TensorDataset(X, Y), ROWS, collate_fn=collate)


@pytest.mark.parametrize("kind", ["collate function", "stream"])
def test_a_loader_may_fill_the_same_memory_with_every_batch(tmp_path, kind):
    module = network()
    wanted, losses = in_torch(copy.deepcopy(module)), []

    class Watch:
        def on_step_end(self, trainer, step, metrics):
            losses.append(float(metrics["loss"]))

    config = TrainingConfig(run={"dir": str(tmp_path), "quiet": True}, data={"shuffle": False}, train={"steps": STEPS})
    optimizer = torch.optim.SGD(module.parameters(), 1e-2)
    Trainer(module, loader(kind), None, config, loss=F.mse_loss, optimizer=optimizer, callbacks=[Watch()]).train()
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)


@pytest.mark.parametrize("kind", ["tensors", "arrays"])
def test_a_batch_may_be_written_over_right_after_its_step(kind):
    """The step is still queued then."""
    module = network(hidden=4096)
    wanted, losses = in_torch(copy.deepcopy(module)), []
    step = jaxtrain.compile(module, loss_of, torch.optim.SGD(module.parameters(), 1e-2))
    x, y = torch.empty(ROWS, WIDTH), torch.empty(ROWS, 1)
    batch = (x, y) if kind == "tensors" else (x.numpy(), y.numpy())
    for one, other in zip(X.split(ROWS), Y.split(ROWS), strict=True):
        x.copy_(one)
        y.copy_(other)
        losses.append(step(batch))
        x.fill_(torch.nan)
    np.testing.assert_allclose([float(loss) for loss in losses], wanted, rtol=1e-5)
