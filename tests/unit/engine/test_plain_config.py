"""TrainingConfig.plain() trains as a plain torch loop does."""

import copy

import pytest
import torch
from torch.utils.data import TensorDataset

from jaxtrain import Trainer, TrainingConfig


def test_a_plain_config_has_the_losses_and_weights_of_a_torch_loop(tmp_path):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    twin, x, y = copy.deepcopy(net), torch.randn(32, 6), 10 * torch.randn(32, 1)  # gradients of norms above 1
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for step in range(20):
        rows = slice(8 * (step % 4), 8 * (step % 4) + 8)
        loss = torch.nn.functional.mse_loss(twin(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    config = TrainingConfig.plain(
        learning_rate=1e-2,
        max_steps=20,
        data={"batch_size": 8, "shuffle": False},
        run={"dir": str(tmp_path), "quiet": True},
    )
    history = Trainer(net, TensorDataset(x, y), None, config, loss=torch.nn.MSELoss()).train()
    means = [sum(losses[i : i + 4]) / 4 for i in range(0, 20, 4)]
    assert [epoch["loss"] for epoch in history["train_history"]] == pytest.approx(means, rel=1e-6)
    for value, expected in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(value, expected, rtol=0, atol=2e-6)


def test_what_is_set_beside_plain_is_kept():
    config = TrainingConfig.plain(weight_decay=0.1, scheduler_type="linear", warmup_steps=3, optim={"name": "sgd"})
    assert (config.optim.name, config.optim.weight_decay, config.optim.clip_norm) == ("sgd", 0.1, None)
    assert (config.optim.schedule.name, config.optim.schedule.warmup_steps) == ("linear", 3)
    assert TrainingConfig.plain().optim.schedule.name == "constant"
    assert TrainingConfig.plain(max_grad_norm=2.0).optim.clip_norm == 2.0
