"""Modules that can never be recorded are refused in one sentence, before anything else is done with them."""

import pytest
import torch
from torch import nn

import jaxtrain
from jaxtrain import Trainer
from jaxtrain.errors import UserError
from tests.e2e.trainings import X, Y, config, mlp


class Pair(nn.Module):
    def __init__(self, first: nn.Parameter, second: torch.Tensor):
        super().__init__()
        self.first = first
        if isinstance(second, nn.Parameter):
            self.second = second
        else:
            self.register_buffer("second", second)

    def forward(self, x):
        return x @ self.first.T + x @ self.second.T


def tied_by_data():
    first = nn.Parameter(torch.randn(3, 6))
    return Pair(first, nn.Parameter(first.data))


def average_not_cloned():
    first = nn.Parameter(torch.randn(3, 6))
    return Pair(first, first.detach())


def expanded():
    return Pair(nn.Parameter(torch.randn(1, 6).expand(3, 6)), torch.ones(3, 6))


def windows_of_one_matrix():
    whole = torch.randn(5, 6)
    return Pair(nn.Parameter(whole[:3]), nn.Parameter(whole[2:]))


def parent_in_child():
    child = nn.Identity()
    child.parent = nn.Sequential(nn.Linear(6, 3), child)
    return child.parent


class Forgetful(nn.Module):
    def __init__(self):
        self.count = 3

    def forward(self, x):
        return x


def without_numbers():
    module = mlp()
    module.register_buffer("mean", torch.zeros(3, device="meta"))
    return module


UNREADY = {
    "on the meta device": (lambda: mlp().to("meta"), "on the meta device and has no numbers: load them"),
    "a part on the meta device": (lambda: nn.Sequential(mlp(), nn.Linear(3, 3, device="meta")), "has no numbers"),
    "a buffer on the meta device": (without_numbers, "mean is on the meta device and has no numbers"),
    "scripted": (lambda: torch.jit.script(mlp()), "compiled by torch.jit; give the module that was scripted"),
    "traced": (lambda: torch.jit.trace(mlp(), X), "compiled by torch.jit; give the module that was scripted"),
    "a scripted part": (lambda: nn.Sequential(torch.jit.script(mlp())), "compiled by torch.jit"),
    "tied by .data": (tied_by_data, "first and second share memory and are trained apart"),
    "an average that is not cloned": (average_not_cloned, "first and second share memory"),
    "overlapping parameters": (windows_of_one_matrix, "first and second share memory"),
    "an expanded parameter": (expanded, "first is expanded: several of its elements are one number"),
    "a module that holds itself": (parent_in_child, "it holds a module that holds it"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), "a LazyLinear has no weights yet; call module"),
}

FORGETFUL = {  # torch gives no parameters of them, so that a loop has no optimizer
    "no super().__init__()": (Forgetful, "Forgetful.__init__ does not call super"),
    "a part without it": (lambda: nn.Sequential(mlp(), Forgetful()), "Forgetful.__init__ does not call super"),
}


@pytest.mark.parametrize("kind", [*UNREADY, *FORGETFUL])
def test_a_trainer_refuses(kind, tmp_path):
    make, sentence = {**UNREADY, **FORGETFUL}[kind]
    with pytest.raises(UserError, match=sentence):
        Trainer(make(), torch.utils.data.TensorDataset(X, Y), None, config(tmp_path), loss=nn.MSELoss())


@pytest.mark.parametrize("kind", UNREADY)
def test_a_compiled_step_refuses(kind):
    make, sentence = UNREADY[kind]
    module = make()
    with pytest.raises(UserError, match=sentence):
        jaxtrain.compile(module, lambda m, b: m(b).mean(), torch.optim.SGD(module.parameters(), 0.1))


def test_parameters_side_by_side_in_one_storage_are_trained(tmp_path):
    whole = torch.randn(6, 12, generator=torch.manual_seed(0))
    module = Pair(nn.Parameter(whole[:3, ::2]), nn.Parameter(whole[:3, 1::2]))  # their reaches cross, they do not
    before = module.second.detach().clone()
    Trainer(module, torch.utils.data.TensorDataset(X, Y), None, config(tmp_path), loss=nn.MSELoss()).train()
    assert not torch.equal(module.second, before)
