"""Python may look at the values of tensors that depend on no input: a grid of times, a mask, `torch.arange(n)`."""

import pytest
import torch
from torch import nn

import jaxtrain
from tests.e2e.loops import assert_same, pair, sgd, torch_step


class Field(nn.Module):
    """The right-hand side of an ODE."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(2, 8), nn.Linear(8, 2)

    def forward(self, y):
        return self.outer(torch.tanh(self.inner(y)))


def _field():
    torch.manual_seed(1)
    return Field()


def _points(steps=4):
    return list(torch.randn(steps, 5, 2, generator=torch.Generator().manual_seed(0)))


def _train(make_loss, between=lambda number: None):
    """Train with torch and compiled; return the compiled step."""
    (theirs, their_optimizer), (ours, optimizer) = pair(_field, sgd)
    plain, points = torch_step(theirs, their_optimizer, make_loss()), _points()
    wanted = []
    for number, batch in enumerate(points):
        wanted.append(plain(batch))
        between(number)
    step = jaxtrain.compile(ours, make_loss(), optimizer)
    for number, batch in enumerate(points):
        assert float(step(batch)) == pytest.approx(wanted[number], rel=1e-5)
        between(number)
    step.sync()
    assert_same(theirs, ours)
    return step


def test_an_ode_solver_on_a_grid_of_times_from_outside_has_torchs_losses():
    """As torchdiffeq's fixed grids: Python compares the times, and the solution is written row by row."""
    times = torch.linspace(0, 1, 5)

    def loss(field, y):
        if times[0] > times[1]:
            raise ValueError("descending")
        grid, times_in = times.to(y.dtype), times
        solution = torch.empty(len(times), *y.shape)
        solution[0] = y
        row = 1
        for start, end in zip(grid[:-1], grid[1:], strict=True):
            y = y + (end - start) * field(y)
            while row < len(times_in) and end >= times_in[row]:
                solution[row] = y
                row += 1
        return solution.square().mean()

    assert "depends on the values of a tensor" in _train(lambda: loss).explain()


def test_a_tensor_from_outside_that_changes_between_steps_counts_with_its_new_values():
    for change in (lambda sign: sign.mul_(-1), lambda sign: sign.fill_(-2.0)):
        signs = []

        def make(signs=signs):
            signs.append(torch.tensor([1.0, -1.0]))
            sign = signs[-1]
            return lambda field, y: (field(y) * (2 if sign[0] > 0 else 5)).square().mean()

        _train(make, lambda number, signs=signs, change=change: change(signs[-1]) if number == 1 else None)


@torch.no_grad()
def _grow(x):
    x.add_(2)


WRITES = {
    "add_": lambda a, view, shadow: a.add_(5),
    "an item": lambda a, view, shadow: a.__setitem__(1, 9.0),
    "a view": lambda a, view, shadow: view.fill_(7),
    "out": lambda a, view, shadow: torch.add(a, 4, out=a),
    "detached": lambda a, view, shadow: shadow.mul_(3),
    "foreach": lambda a, view, shadow: torch._foreach_add_([a], 2),
    "a view without gradients": lambda a, view, shadow: _grow(view),
    "copy_": lambda a, view, shadow: view.copy_(torch.tensor([6.0, 8.0])),
}


QUICK = {"add_", "a view", "detached"}  # of a kind each; the others are among the slow tests


@pytest.mark.parametrize("write", [w if w in QUICK else pytest.param(w, marks=pytest.mark.slow) for w in WRITES])
def test_a_write_to_a_known_tensor_is_seen_through_all_its_views(write):
    def loss(field, y):
        a = torch.arange(3.0)
        view, shadow, column = a[1:], a.detach(), a.view(3, 1)
        WRITES[write](a, view, shadow)
        out = field(y)
        for number, value in enumerate((a[1], view[0], shadow[1], column[1, 0])):
            out = out * (1.1 + number) if value > 1.5 else out
            out = out + number if value > 4.5 else out
        return (out * 0.01).square().mean()

    _train(lambda: loss)


def test_a_write_to_another_tensor_leaves_known_values_known():
    def loss(field, y):
        weights = torch.arange(3.0)
        torch.empty(3).fill_(2)
        return sum(field(y).square().mean() * w for w in weights if w > 0)

    _train(lambda: loss)
