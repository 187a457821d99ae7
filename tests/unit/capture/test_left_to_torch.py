"""What the backend leaves to torch, with a line that says why, and what it refuses."""

import pytest
import torch
from torch import nn

from tests.unit.capture.sides import assert_same, draw, raises
from torch_bridge.capture import torch_api
from torch_bridge.capture.backend import jaxtrain


def test_an_operator_without_lowering():
    def loss(module, x):
        return torch.geqrf(module(x).detach())[1].sum() + module(x).pow(2).mean()

    run = lambda module, compiler, number: [compiler(loss)(module, draw(4, 6, seed=number))]
    assert_same(lambda: nn.Linear(6, 6), run, in_torch="no lowering for aten.geqrf.default")


def test_another_dtype_by_default():
    def loss(module, x):
        return (module(x) * torch.arange(6).div(2)).pow(2).mean()

    def run(module, compiler, number):
        torch.set_default_dtype(torch.float64)
        try:
            return [compiler(loss)(module, draw(4, 6, seed=number).double())]
        finally:
            torch.set_default_dtype(torch.float32)

    assert_same(lambda: nn.Linear(6, 6).double(), run, in_torch="gives float32 in JAX and torch.float64 in torch")


def test_an_index_that_torch_refuses():
    def run(module, compiler, number):
        compiled = compiler(module)
        raises(IndexError, compiled, torch.tensor([1, 7]))
        return [compiled(torch.tensor([1, 2])).sum()]

    assert_same(lambda: nn.Embedding(5, 3), run)


def test_an_index_computed_from_floats_that_torch_refuses():
    def rows(module, x):
        return module(x)[(x[:, 0] * 10).long()].sum()

    def run(module, compiler, number):
        compiled = compiler(rows)
        raises(IndexError, compiled, module, torch.ones(2, 4))
        return [compiled(module, torch.tensor([[0.1, 0, 0, 0], [0, 0, 0, 0]]))]

    assert_same(lambda: nn.Linear(4, 4), run)


def test_an_integer_divided_by_zero():
    def divided(module, a, b):
        return a // b, a % b, module.weight.sum()

    def run(module, compiler, number):
        compiled, numbers = compiler(divided), torch.tensor([7, -7])
        assert "ZeroDivisionError" in raises(RuntimeError, compiled, module, numbers, torch.tensor([2, 0]))
        return [*compiled(module, numbers, torch.tensor([2, 3]))]

    assert_same(lambda: nn.Linear(4, 4), run)


def test_an_assertion_that_fails_raises_torchs_error():
    def checked(module, x):
        torch._assert_async((x < 100).all(), "too large")
        return module(x).sum()

    def run(module, compiler, number):
        compiled, x = compiler(checked), draw(4, 6, seed=number)
        assert "too large" in raises(RuntimeError, compiled, module, x + 1000)
        return [compiled(module, x)]

    assert_same(lambda: nn.Linear(6, 6), run)


def test_a_factorization_that_fails_raises_torchs_error():
    def factor(module, x):
        return torch.linalg.cholesky(x + 0 * module.weight).sum()

    def run(module, compiler, number):
        compiled = compiler(factor)
        value = compiled(module, draw(3, 3, seed=number) * 0.1 + torch.eye(3))
        raises(torch.linalg.LinAlgError, compiled, module, -torch.eye(3))
        return [value.detach()]

    assert_same(lambda: nn.Linear(3, 3), run, in_torch="checks a matrix")


def test_a_graph_that_autograd_refuses_raises_as_in_torch():
    def write(parameter):
        return parameter.add_(1).sum()

    torch_api.reset()
    parameter = nn.Parameter(torch.ones(3))
    assert "leaf Variable that requires grad" in raises(RuntimeError, torch.compile(write, backend=jaxtrain), parameter)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"mode": "max-autotune"}, "this backend has none to choose from"),
        ({"options": {"a": 1}}, "the one option is 'wait', True or False"),
        ({"options": {"wait": 1}}, "the one option is 'wait', True or False"),
    ],
)
def test_modes_and_other_options_are_refused(options, why):
    torch_api.reset()
    compiled = torch.compile(nn.Linear(2, 2), backend=jaxtrain, **options)
    with pytest.raises(Exception, match=why):
        compiled(torch.ones(1, 2))
