"""Classes, ids and positions that torch refuses are refused before a step, and those that it takes are not."""

import copy
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import jaxtrain
from jaxtrain import Trainer, TrainingConfig, UserError
from jaxtrain.errors import DataError

pytestmark = pytest.mark.slow

draw = torch.Generator().manual_seed(0)
X, Y = torch.randn(8, 4, generator=draw), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
IDS = torch.randint(0, 5, (8, 4), generator=draw)
MAPS, CLASSES = torch.randn(8, 1, 4, 4, generator=draw), torch.randint(0, 3, (8, 4, 4), generator=draw)
VOID = CLASSES.clone()
VOID[3, 1, 1] = 255


def linear():
    return nn.Linear(4, 3)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.ids, self.positions, self.head = nn.Embedding(5, 4), nn.Embedding(6, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head((self.ids(x) + self.positions(torch.arange(x.shape[1], device=x.device))).mean(1))


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.tensor([2, 1, 0]))
        self.embedding = nn.Embedding(3, 3)

    def forward(self, x):
        return self.embedding(self.table[x])


def cross_entropy(module, batch):
    return F.cross_entropy(module(batch[0]), batch[1])


def of_linear(function):
    return linear, lambda module, batch: function(module(batch[0]), batch[1])


ROWS = torch.arange(8)
KINDS = {  # module, loss, a batch that torch takes, one that it refuses
    "class": (linear, cross_entropy, (X, Y), (X, Y + 5)),
    "negative class": (linear, cross_entropy, (X, Y), (X, Y - 1)),
    "ignored class": (linear, cross_entropy, (X, torch.where(Y == 2, -100, Y)), (X, torch.where(Y == 2, -99, Y))),
    "void of a map": (
        lambda: nn.Conv2d(1, 3, 1),
        lambda module, batch: F.cross_entropy(module(batch[0]), batch[1], ignore_index=255),
        (MAPS, VOID),
        (MAPS, VOID + 1),
    ),
    "class of a map": (lambda: nn.Conv2d(1, 3, 1), cross_entropy, (MAPS, CLASSES), (MAPS, VOID)),
    "computed class": (
        *of_linear(lambda out, y: F.nll_loss(out.log_softmax(1), torch.where(y == 2, -100, y))),
        (X, Y),
        (X, Y + 1),
    ),
    "selected rows": (*of_linear(lambda out, y: F.cross_entropy(out[y > 0], y[y > 0])), (X, Y), (X, Y + 1)),
    "margin": (*of_linear(F.multi_margin_loss), (X, Y), (X, Y + 1)),
    "one hot": (*of_linear(lambda out, y: (out * F.one_hot(y, 3)).mean()), (X, Y), (X, Y + 1)),
    "id": (Positions, cross_entropy, (IDS, Y), (IDS + 3, Y)),
    "negative id": (Positions, cross_entropy, (IDS, Y), (IDS - 5, Y)),
    "too many positions": (Positions, cross_entropy, (IDS[:, [0, 1, 2, 3, 0, 1]], Y), (IDS[:, [0] * 7], Y)),
    "id through a table": (Table, cross_entropy, (Y, Y), (Y + 1, Y)),
    "bag": (lambda: nn.EmbeddingBag(5, 3), cross_entropy, (IDS, Y), (IDS + 2, Y)),
    "gather": (*of_linear(lambda out, y: out.gather(1, y[:, None]).mean()), (X, Y), (X, Y + 1)),
    "index": (*of_linear(lambda out, y: out[ROWS, y].mean()), (X, Y), (X, Y + 1)),
    "index from the end": (*of_linear(lambda out, y: out[ROWS, y - 3].mean()), (X, Y), (X, Y - 1)),
    "index_select": (*of_linear(lambda out, y: out.index_select(0, y).mean()), (X, Y), (X, Y + 7)),
    "scatter_add": (
        *of_linear(lambda out, y: torch.zeros(5).scatter_add(0, y, out[:, 0]).square().mean()),
        (X, Y),
        (X, Y + 3),
    ),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_what_torch_refuses_is_refused_and_what_it_takes_is_computed(kind):
    make, loss, taken, refused = kind
    module = make()
    twin = copy.deepcopy(module)
    step = jaxtrain.compile(module, loss, torch.optim.SGD(module.parameters(), 0.1))
    assert float(step(taken)) == pytest.approx(float(loss(twin, taken).detach()), rel=1e-4)
    with pytest.raises((IndexError, RuntimeError)) as torchs:
        loss(twin, refused)
    own = r"the batch holds .* -?\d+, wanted -?\d+ to \d"
    with pytest.raises((UserError, torchs.type), match=f"{own}|{re.escape(str(torchs.value))[:40]}"):
        step(refused)
    assert step.count == 1


def test_evaluation_refuses_ids_too():
    module = Positions()
    step = jaxtrain.compile(module, cross_entropy, torch.optim.SGD(module.parameters(), 0.1))
    forward = step.eval()
    torch.testing.assert_close(forward(IDS), module.eval()(IDS).detach())
    with pytest.raises(UserError, match="the batch holds embedding row") as caught:
        forward(IDS + 3)
    assert isinstance(caught.value, IndexError)  # as a script that catches torch's may expect


class Items(torch.utils.data.Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


X64, Y64 = torch.randn(64, 4, generator=draw), torch.randint(0, 3, (64,), generator=draw)
WRONG = Y64.clone()
WRONG[41] = 7


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("form", ["dataset", "arrays"])
def test_a_run_names_the_sample_whose_class_does_not_exist(tmp_path, form, accumulate):
    data = Items(X64, WRONG) if form == "dataset" else {"x": X64.numpy(), "y": WRONG.numpy().astype(np.int32)}
    config = TrainingConfig(
        run={"dir": str(tmp_path), "quiet": True},
        data={"batch_size": 16},
        train={"steps": 4, "accumulate_steps": accumulate},
    )
    with pytest.raises(DataError, match=r"the batch holds class 7, wanted 0 to 2, or -100, .* \(sample 41\)"):
        Trainer(linear(), data, None, config, loss=nn.CrossEntropyLoss()).train()


def test_a_validation_set_is_looked_at_too(tmp_path):
    config = TrainingConfig(run={"dir": str(tmp_path), "quiet": True}, data={"batch_size": 8}, train={"steps": 8})
    trainer = Trainer(linear(), Items(X64, Y64), Items(X64, WRONG), config, loss=nn.CrossEntropyLoss())
    with pytest.raises(DataError, match=r"the batch holds class 7.* \(sample 41\)"):
        trainer.train()


def test_a_batch_that_its_loss_writes_to_is_written_as_in_torch():
    def masked(module, batch):
        x, y = batch
        y[y == 2] = -100
        x.mul_(1.5)
        return F.cross_entropy(module(x), y)

    module = linear()
    twin, ours, theirs = copy.deepcopy(module), (X.clone(), Y.clone()), (X.clone(), Y.clone())
    optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    step = jaxtrain.compile(module, masked, torch.optim.SGD(module.parameters(), 0.1))
    for _ in range(3):
        optimizer.zero_grad()
        loss = masked(twin, theirs)
        loss.backward()
        optimizer.step()
        assert float(step(ours)) == pytest.approx(float(loss.detach()), rel=1e-4)
    torch.testing.assert_close(ours, theirs)
