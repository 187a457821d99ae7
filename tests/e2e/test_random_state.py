"""torch's, numpy's and Python's global generators after steps that draw nothing from them, as torch itself leaves them.

The order of the next epoch is drawn from them. `test_drop_in_examples` compares the states over all examples.
"""

import contextlib
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import jaxtrain
from examples.drop_in.common import random_state
from jaxtrain import Trainer, TrainingConfig
from torch_bridge.capture.module_call import compile_calls
from torch_bridge.random_state import undrawn


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, 3)

    def forward(self, ids):
        return self.head(self.dropout(self.embedding(ids)).mean(1))


class Wide(Net):
    """Its integers may leave 32 bits: the forward is refused while it is compiled, and runs in torch in parts."""

    def forward(self, ids):
        seen = torch.zeros(4, dtype=torch.int64)
        seen[torch.tensor([1])] = ids.sum() * 2**20 * 2**20
        return super().forward(ids) + 0 * seen.sum()


class Drawing(Net):
    """It draws from Python's and numpy's generators while it runs, as torch would."""

    def forward(self, ids):
        return super().forward(ids) * (1 + 0 * random.random()) * float(1 + 0 * np.random.rand())


class Branching(Net):
    """It branches on values: no single program."""

    def forward(self, ids):
        return super().forward(ids) * (2 if ids.sum() > 3 else 1)


def seed():
    random.seed(5)
    np.random.seed(6)
    torch.manual_seed(7)


def batches(lengths=(4, 4, 6, 4, 6, 9)):
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(0, 16, (5, length), generator=draw) for length in lengths]


def loss_of(module, ids):
    return F.cross_entropy(module(ids), ids[:, 0] % 3)


def in_torch(module, optimizer):
    def step(ids):
        loss = loss_of(module, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def through_calls(module, optimizer):
    compile_calls([module])
    return in_torch(module, optimizer)


def as_one_program(module, optimizer):
    return jaxtrain.compile(module, loss_of, optimizer)


def states(make, kind):
    """The generators' states after each step, from the same seeds."""
    torch.manual_seed(0)
    module = kind()
    seed()
    step = make(module, torch.optim.SGD(module.parameters(), 0.1))
    found = []
    for ids in batches():
        step(ids)
        found.append(random_state())
    return found


@pytest.mark.parametrize("kind", [Net, Wide, Drawing, Branching])
@pytest.mark.parametrize("make", [through_calls, as_one_program])
def test_steps_leave_the_generators_as_torch_does(make, kind):
    assert states(make, kind) == states(in_torch, kind)


def test_recording_that_ends_in_an_error_draws_nothing():
    module = Net()
    step = jaxtrain.compile(module, lambda module, ids: module(ids).nope(), torch.optim.SGD(module.parameters(), 0.1))
    seed()
    before = random_state()
    with contextlib.suppress(Exception):
        step(batches()[0])
    assert random_state() == before


def test_evaluation_draws_nothing():
    module = Net(dropout=0.5)
    evaluated = jaxtrain.compile(module, loss_of, torch.optim.SGD(module.parameters(), 0.1)).eval()
    seed()
    before = random_state()
    for ids in batches():
        evaluated(ids)
    assert random_state() == before


def test_a_compiled_forward_with_dropout_draws_one_number_a_call():
    torch.manual_seed(0)
    step = through_calls(module := Net(dropout=0.5), torch.optim.SGD(module.parameters(), 0.1))
    seed()
    for ids in batches((4, 4, 6)):
        step(ids)
    after = torch.get_rng_state()
    seed()
    for _ in range(3):
        torch.randint(1 << 31, ())
    assert torch.equal(torch.get_rng_state(), after)


def order_of_epochs(make, generator):
    """What a loader with shuffle=True gives in two epochs of a model with dropout."""
    torch.manual_seed(0)
    module = Net(dropout=0.5)
    step = make(module, torch.optim.SGD(module.parameters(), 0.1))
    rows = torch.randint(0, 16, (20, 4))
    numbered = torch.utils.data.TensorDataset(rows, torch.arange(20))
    torch.manual_seed(1)
    loader = torch.utils.data.DataLoader(numbered, 5, shuffle=True, generator=generator)
    seen = []
    for _ in range(2):
        for ids, numbers in loader:
            step(ids)
            seen += numbers.tolist()
    return seen


def test_with_dropout_an_order_of_the_loaders_own_generator_is_torchs():
    own = lambda: torch.Generator().manual_seed(3)
    assert order_of_epochs(as_one_program, own()) == order_of_epochs(in_torch, own())
    drawn, torchs = order_of_epochs(as_one_program, None), order_of_epochs(in_torch, None)
    assert drawn[:20] == torchs[:20]  # the first epoch's was drawn before the first dropout
    assert drawn[20:] != torchs[20:]  # as docs/own_loop.md says


class Rows(torch.utils.data.Dataset):
    """Samples drawn from all three global generators."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.rand(4) + random.random() + float(np.random.rand()), torch.tensor(index % 2)


def test_a_trainer_leaves_the_generators_alone(tmp_path):
    module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    config = TrainingConfig(
        run={"dir": str(tmp_path / "run"), "quiet": True}, data={"batch_size": 8}, train={"epochs": 2}
    )
    seed()
    before = random_state()
    trainer = Trainer(module, Rows(), Rows(), config, loss=nn.CrossEntropyLoss())
    trainer.train()
    trainer.evaluate()
    trainer.state_dict()
    assert random_state() == before
    trainer.verify(2)
    assert random_state() == before


def test_what_is_run_undrawn_may_draw_and_seed():
    seed()
    before = random_state()
    with contextlib.suppress(ValueError), undrawn():
        torch.rand(3), np.random.rand(3), random.random()
        torch.manual_seed(0)
        raise ValueError
    assert random_state() == before
