"""torch.utils.checkpoint runs a part twice, and BatchNorm counts it twice: so it does here."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import jaxtrain
from jaxtrain import Trainer, TrainingConfig


class Checkpointed(torch.nn.Module):
    """how: the kind of checkpoint. branches: on a value, so that torch runs the forward around compiled parts."""

    def __init__(self, how: str, branches: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.how, self.branches = how, branches
        self.first = torch.nn.Sequential(torch.nn.Linear(6, 4, bias=False), torch.nn.BatchNorm1d(4), torch.nn.ReLU())
        self.last = torch.nn.Linear(4, 2)

    def forward(self, x):
        if self.how == "reentrant":
            y = checkpoint(self.first, x.requires_grad_(True), use_reentrant=True)
        elif self.how == "sequential":  # the last of its segments, with BatchNorm, is not checkpointed
            y = checkpoint_sequential(self.first, 2, x, use_reentrant=False)
        else:
            y = checkpoint(self.first, x, use_reentrant=False)
        if self.branches and float(y.detach().max()) > 100:
            y = y / 2
        return self.last(y)


ROWS = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
CASES = {
    "plain": ("plain", False, 10),
    "reentrant": ("reentrant", False, 10),
    "sequential": ("sequential", False, 5),
    "a branch": ("plain", True, 10),
}


def _in_torch(module):
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for batch in ROWS.clone().split(8):
        module(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return module.state_dict()


@pytest.mark.parametrize("case", CASES)
def test_a_loop_counts_batches_as_torch_does(case):
    how, branches, tracked = CASES[case]
    wanted, module = _in_torch(Checkpointed(how, branches)), Checkpointed(how, branches)
    loss_fn = lambda m, batch: m(batch).pow(2).mean()
    step = jaxtrain.compile(module, loss_fn, torch.optim.SGD(module.parameters(), 0.1))
    for batch in ROWS.clone().split(8):
        step(batch)
    step.sync()
    assert int(module.first[1].num_batches_tracked) == tracked
    torch.testing.assert_close(module.state_dict(), wanted, rtol=1e-5, atol=1e-5)


def test_a_trainer_counts_batches_as_torch_does(tmp_path):
    wanted, module = _in_torch(Checkpointed("plain")), Checkpointed("plain")
    config = TrainingConfig(
        train={"steps": 5},
        data={"batch_size": 8, "shuffle": False},
        optim={"clip_norm": None},
        run={"dir": str(tmp_path / "run")},
    )
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    data = torch.utils.data.TensorDataset(ROWS)
    Trainer(module, data, None, config, loss=lambda outputs: outputs.pow(2).mean(), optimizer=optimizer).train()
    torch.testing.assert_close(module.state_dict(), wanted, rtol=1e-5, atol=1e-5)
