"""What Python computes of numbers that change is computed as Python computes it."""

import math

import pytest
import torch
from torch import nn

import jaxtrain

CASES = {
    "a bias correction": (lambda t: 1 - 0.999**t, [1, 2, 3]),
    "a difference below float32": (lambda t: 1 - t, [1 - 1e-9, 1 - 2e-9, 1 - 3e-9]),
    "rounding down": (lambda t: t // 3 + t % 3, [-7, -5, 8]),
    "beyond 32 bits": (lambda t: t * t / 1e9, [70_000, 70_001, 70_002]),
    "beyond 64 bits": (lambda t: t**5 / 1e24, [70_000, 70_001, 70_002]),
    "its size": (lambda t: abs(-t) / 7, [0.5, -0.25, 1.5]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("where", ["attribute", "batch"])
def test_arithmetic_of_changing_numbers_is_pythons(case, where):
    compute, values = CASES[case]
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    module.number = values[0]
    loss_fn = lambda module, batch: (
        module(batch[0]).mean() * compute(module.number if where == "attribute" else batch[1])
    )
    step = jaxtrain.compile(module, loss_fn, torch.optim.SGD(module.parameters(), lr=0.0))
    for value in values:
        module.number = value
        batch = torch.ones(4, 3), value
        assert float(step(batch)) == pytest.approx(float(loss_fn(module, batch).detach()), rel=1e-6)
    assert step.torch is None
    assert len(step.programs) == 2  # one with the first value, one for all others


def test_a_division_by_zero_raises_as_in_python():
    module = nn.Linear(3, 2)
    step = jaxtrain.compile(
        module, lambda module, batch: module(batch[0]).mean() * (1 / batch[1]), torch.optim.SGD(module.parameters())
    )
    x = torch.ones(4, 3)
    losses = [float(step((x, number))) for number in (1, 2, 3)]
    assert all(map(math.isfinite, losses))
    with pytest.raises(ZeroDivisionError):
        step((x, 0))
    assert math.isfinite(float(step((x, 4))))


@pytest.mark.parametrize("where", ["attribute", "batch"])
def test_a_division_by_zero_that_the_loss_catches_takes_its_other_way(where):
    def loss_fn(module, batch):
        number = module.number if where == "attribute" else batch[1]
        try:
            weight = 6 / (number - 3)
        except ZeroDivisionError:
            weight = 0.5
        return module(batch[0]).mean() * weight

    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    step = jaxtrain.compile(module, loss_fn, torch.optim.SGD(module.parameters(), lr=0.0))
    for number in (1, 2, 3, 4, 3, 5):
        module.number = number
        batch = torch.ones(4, 3), number
        assert float(step(batch)) == pytest.approx(float(loss_fn(module, batch).detach()), rel=1e-6)


def test_an_output_that_is_a_number_stays_one():
    Accelerator = pytest.importorskip("jaxtrain.accelerate", exc_type=ImportError).Accelerator

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x, scale):
            return self.layer(x) * scale, scale, scale * 0.1

    module = Accelerator(cpu=True).prepare(Scaled())
    x = torch.ones(4, 3)
    for scale in (0.5, 1.5, 2.5):
        assert module(x, scale)[1:] == (scale, scale * 0.1)


def test_tensors_of_changing_numbers_are_tensors():
    def loss_fn(module, batch):
        x, number = batch
        made = torch.tensor([number, 1.0])
        return (module(x) * made).mean() + torch.as_tensor(number / 2) * (2 if torch.is_tensor(made) else 1)

    module = nn.Linear(3, 2)
    step = jaxtrain.compile(module, loss_fn, torch.optim.SGD(module.parameters(), lr=0.0))
    for number in (0.25, 0.5, 0.75):
        batch = torch.ones(4, 3), number
        assert float(step(batch)) == pytest.approx(float(loss_fn(module, batch).detach()), rel=1e-6)
    assert step.torch is None
