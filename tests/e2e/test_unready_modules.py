"""Modules that can never be recorded are refused in one sentence, before anything else is done with them."""

import pytest
import torch
from torch import nn

import jaxtrain
from jaxtrain import Trainer
from jaxtrain.errors import UserError
from tests.e2e.trainings import X, Y, config, mlp

UNREADY = {
    "scripted": (lambda: torch.jit.script(mlp()), "compiled by torch.jit; give the module that was scripted"),
    "traced": (lambda: torch.jit.trace(mlp(), X), "compiled by torch.jit; give the module that was scripted"),
    "a scripted part": (lambda: nn.Sequential(torch.jit.script(mlp())), "compiled by torch.jit"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), "a LazyLinear has no weights yet; call module"),
}


@pytest.mark.parametrize("kind", UNREADY)
def test_a_trainer_refuses(kind, tmp_path):
    make, sentence = UNREADY[kind]
    with pytest.raises(UserError, match=sentence):
        Trainer(make(), torch.utils.data.TensorDataset(X, Y), None, config(tmp_path), loss=nn.MSELoss())


@pytest.mark.parametrize("kind", UNREADY)
def test_a_compiled_step_refuses(kind):
    make, sentence = UNREADY[kind]
    module = make()
    with pytest.raises(UserError, match=sentence):
        jaxtrain.compile(module, lambda m, b: m(b).mean(), torch.optim.SGD(module.parameters(), 0.1))
