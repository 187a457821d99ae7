"""optim.groups by pattern, with epochs in which they train, beside the same training written in torch."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from jaxtrain import Trainer, TrainingConfig

ROWS, PER_EPOCH, EPOCHS = 8, 4, 5


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.ModuleDict({"encoder": nn.Linear(6, 8), "head": nn.Linear(8, 1)})


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = net()

    def forward(self, x):
        return self.parts["head"](torch.tanh(self.parts["encoder"](x)))


def data() -> torch.utils.data.TensorDataset:
    draw = torch.Generator().manual_seed(0)
    count = PER_EPOCH * ROWS
    return torch.utils.data.TensorDataset(torch.randn(count, 6, generator=draw), torch.randn(count, 1, generator=draw))


def train(folder, groups, **optim) -> tuple[nn.Module, Trainer]:
    settings = {"name": "adamw", "lr": 1e-2, "clip_norm": None, "schedule": {"name": "constant"}, **optim}
    config = TrainingConfig(
        run={"dir": str(folder), "quiet": True},
        data={"batch_size": ROWS, "shuffle": False},
        train={"epochs": EPOCHS, "steps_per_call": 3},
        optim={**settings, "groups": groups},
        tracking={"tensorboard": False},
    )
    module = Net()
    trainer = Trainer(module, data(), config=config, loss=nn.MSELoss())
    trainer.train()
    return module, trainer


def torch_loop(rests, rates) -> nn.Module:
    """rests: epoch -> whether the encoder's gradients are off."""
    module = Net()
    encoder, head = module.parts["encoder"], module.parts["head"]
    optimizer = torch.optim.AdamW(
        [{"params": encoder.parameters(), "lr": rates[0]}, {"params": head.parameters(), "lr": rates[1]}]
    )
    inputs, targets = data().tensors
    for epoch in range(EPOCHS):
        encoder.requires_grad_(not rests(epoch))
        for step in range(PER_EPOCH):
            rows = slice(step * ROWS, (step + 1) * ROWS)
            optimizer.zero_grad()
            F.mse_loss(module(inputs[rows]), targets[rows]).backward()
            optimizer.step()
    return module


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, got), want in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        np.testing.assert_allclose(got.numpy(), want.numpy(), atol=1e-5, rtol=1e-5, err_msg=name)


CASES = {
    "rate": ({"lr": 1e-3}, lambda epoch: False),
    "frozen": ({"lr": 1e-3, "freeze": True}, lambda epoch: True),
    "late": ({"lr": 1e-3, "freeze_until_epoch": 2}, lambda epoch: epoch < 2),
    "early": ({"lr": 1e-3, "freeze_after_epoch": 3}, lambda epoch: epoch >= 3),
    "both": ({"lr": 1e-3, "freeze_until_epoch": 1, "freeze_after_epoch": 3}, lambda epoch: not 1 <= epoch < 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_groups_train_as_in_torch(tmp_path, case):
    options, rests = CASES[case]
    module, _ = train(tmp_path, {"encoder": {"match": "parts.encoder.*", **options}})
    assert_same(module, torch_loop(rests, (1e-3, 1e-2)))


def test_a_group_that_begins_later_compiles_once_more_and_is_announced(tmp_path):
    module, trainer = train(tmp_path, {"encoder": {"match": "parts.encoder.*", "lr": 1e-3, "freeze_until_epoch": 2}})
    assert_same(module, torch_loop(lambda epoch: epoch < 2, (1e-3, 1e-2)))
    log = (tmp_path / "train.log").read_text()
    assert "from epoch 0 on encoder does not train" in log
    assert "from epoch 2 on encoder trains" in log
    told = trainer.describe().splitlines()
    assert "group encoder: 2 parameters, 56 numbers, lr 0.001, frozen until epoch 2" in told
    assert any(line.startswith("group default: 2 parameters") and "parts.head.weight" in line for line in told)
