"""Modules whose state_dict is not the list of their parameters are trained in place all the same."""

import copy

import pytest
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from jaxtrain import Trainer
from tests.e2e.trainings import X, Y, assert_torchs, config, mlp, train_in_torch


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        return self.net(x)


class Renames(Base):
    def state_dict(self, *args, **kwargs):
        return {key.replace("net.", "layers."): value for key, value in super().state_dict(*args, **kwargs).items()}


class LeavesOut(Base):
    def state_dict(self, *args, **kwargs):
        return {key: value for key, value in super().state_dict(*args, **kwargs).items() if "bias" not in key}


class ExtraState(Base):
    def get_extra_state(self):
        return {"version": 3}

    def set_extra_state(self, state):
        self.version = state["version"]


@pytest.mark.parametrize("kind", [Renames, LeavesOut, ExtraState])
def test_the_trained_weights_are_torchs(kind, tmp_path):
    ours = kind()
    theirs = copy.deepcopy(ours)
    Trainer(ours, TensorDataset(X, Y), None, config(tmp_path), loss=nn.MSELoss()).train()
    train_in_torch(theirs, TensorDataset(X, Y), lambda module, batch: mse_loss(module(batch[0]), batch[1]))
    assert_torchs(theirs.net, ours.net)
