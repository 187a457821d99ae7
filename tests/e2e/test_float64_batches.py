"""float64 entries of a batch: float32 where that changes nothing to speak of, else torch, or a refusal."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import jaxtrain
from jaxtrain import Trainer, TrainingConfig, UserError
from tests.e2e.loops import assert_same, batches, check, pair

NOW = 1.7e9  # a time in seconds: float32 keeps two minutes of it
GENERATOR = torch.Generator().manual_seed(3)
WITHIN = torch.rand(32, 3, generator=GENERATOR, dtype=torch.float64)
TARGETS = torch.randn(32, 1, generator=GENERATOR)
MEANINGS = {
    "time since": lambda t: t - NOW,
    "time of the minute": lambda t: torch.sin(t % 60),
    "past": lambda t: t > NOW + 0.5,
}


class Clock(nn.Module):
    def __init__(self, meaning):
        super().__init__()
        torch.manual_seed(0)
        self.meaning, self.linear = meaning, nn.Linear(3, 1)

    def forward(self, time):
        return self.linear(self.meaning(time).float())


def loss_of(module, batch):
    return F.mse_loss(module(batch[0]), batch[1])


def pairs(inputs):
    return list(zip(inputs.split(8), TARGETS.split(8), strict=True))


def trained(module, data) -> nn.Module:
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
    for batch in data:
        optimizer.zero_grad()
        loss_of(module, batch).backward()
        optimizer.step()
    return module


def settings(folder):
    return TrainingConfig(
        train={"steps": 4}, data={"batch_size": 8, "shuffle": False}, optim={"clip_norm": None}, run={"dir": folder}
    )


@pytest.mark.parametrize("meaning", MEANINGS)
def test_what_float32_loses_is_computed_in_torch(meaning, caplog):
    ours, data = Clock(MEANINGS[meaning]), pairs(NOW + WITHIN)
    theirs = trained(copy.deepcopy(ours), data)
    step = jaxtrain.compile(ours, loss_of, torch.optim.AdamW(ours.parameters(), 1e-2))
    for batch in data:
        step(batch)
    step.sync()
    assert_same(theirs, ours)
    assert "float64 values are float32 here" in caplog.text


@pytest.mark.parametrize("meaning", MEANINGS)
def test_a_trainer_refuses_what_float32_loses_and_names_the_line(meaning, tmp_path):
    dataset = TensorDataset(NOW + WITHIN, TARGETS)
    with pytest.raises(UserError, match=r"float64 values are float32.* at .*test_float64_batches\.py:\d+"):
        Trainer(Clock(MEANINGS[meaning]), dataset, None, settings(tmp_path), loss=nn.MSELoss())


@pytest.mark.parametrize("inputs", [WITHIN, 50_000 + 100 * WITHIN], ids=["small", "prices"])
def test_float64_that_float32_holds_well_enough_trains_to_torchs_weights(inputs, tmp_path, caplog):
    """Prices around 50,000 keep a thousandth of their spread."""
    ours = Clock(lambda x: (x - inputs.mean()) / inputs.std())
    theirs, looped = trained(copy.deepcopy(ours), pairs(inputs)), copy.deepcopy(ours)
    step = jaxtrain.compile(looped, loss_of, torch.optim.AdamW(looped.parameters(), 1e-2))
    for batch in pairs(inputs):
        step(batch)
    step.sync()
    assert_same(theirs, looped)
    assert "float64" not in caplog.text
    optimizer = torch.optim.AdamW(ours.parameters(), 1e-2)
    Trainer(
        ours, TensorDataset(inputs, TARGETS), None, settings(tmp_path), loss=nn.MSELoss(), optimizer=optimizer
    ).train()
    assert_same(theirs, ours)


def test_a_module_in_float64_is_trained_in_float64():
    ours = nn.Linear(3, 1).double()
    theirs = trained(copy.deepcopy(ours), data := [(x, y.double()) for x, y in pairs(WITHIN)])
    step = jaxtrain.compile(ours, loss_of, torch.optim.AdamW(ours.parameters(), 1e-2))
    for batch in data:
        step(batch)
    step.sync()
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-12, atol=0)


class Kernel(nn.Module):
    """A Gaussian process whose Cholesky factor float32 does not have."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.scale = nn.Linear(3, 2), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        points = torch.linspace(-1, 1, 20).double()[:, None].expand(-1, 2)
        kernel = torch.exp(-(torch.cdist(points, points) ** 2) / (2 * self.scale.double() ** 2))
        factor = torch.linalg.cholesky(kernel + 1e-8 * torch.eye(20, dtype=torch.float64))
        cross = torch.exp(-(torch.cdist(self.linear(x).double(), points) ** 2) / 2)
        return torch.linalg.solve_triangular(factor, cross.T, upper=False).pow(2).mean(0).float()[:, None]


class Offset(nn.Module):
    """float64 of a buffer and of weights: what is left of their difference has no digits in float32."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1)
        self.register_buffer("start", torch.tensor(NOW, dtype=torch.float64))

    def forward(self, x):
        return ((self.linear(x).double() + self.start) - NOW).float()


@pytest.mark.parametrize("kind", [Kernel, Offset])
def test_float64_inside_a_forward_is_torchs_in_a_loop_and_refused_by_a_trainer(kind, tmp_path):
    """Weights after 4 steps within 1e-5 of torch's; in float32 the first were nan, the second off by 5 percent."""
    inputs = WITHIN.float()
    module = kind()
    wanted = trained(kind(), pairs(inputs)).state_dict()
    step = jaxtrain.compile(module, loss_of, torch.optim.AdamW(module.parameters(), 1e-2))
    for batch in pairs(inputs):
        step(batch)
    step.sync()
    torch.testing.assert_close(module.state_dict(), wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match=r"float64 is float32 here, which (fails|changes)[\s\S]*jaxtrain\.compile"):
        Trainer(kind(), TensorDataset(inputs, TARGETS), None, settings(str(tmp_path)), loss=nn.MSELoss())


def test_float64_inside_a_forward_that_float32_holds_is_compiled(tmp_path):
    class Mild(nn.Linear):
        def forward(self, x):
            return super().forward(x).double().tanh().float()

    module = Mild(3, 1)
    step = jaxtrain.compile(module, loss_of, torch.optim.AdamW(module.parameters(), 1e-2))
    step(pairs(WITHIN.float())[0])
    assert step.torch is None


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.factor * grad, None


def test_an_own_gradient_follows_a_number_of_float64_in_the_batch():
    def loss(module, batch):
        return F.mse_loss(Reversed.apply(module(batch[0]), batch[2]), batch[1])

    data = [(*batch, np.float64(-0.1 * number)) for number, batch in enumerate(batches(4))]
    check(*pair(), loss, data)
