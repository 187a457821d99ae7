"""Items of (arguments, target): the arguments reach forward one by one, by name, or as they are."""

import copy

import pytest
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from jaxtrain import Trainer
from tests.e2e.trainings import SAMPLES, X, Y, assert_torchs, config, mlp, train_in_torch


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = mlp(), mlp()

    def forward(self, a, b):
        return self.first(a) - 2 * self.second(b)


class Optional(Two):
    def forward(self, a=None, b=None, scale=None):
        return super().forward(a, b)


class Rest(Two):
    def forward(self, *given):
        return super().forward(*given)


class Pair(Two):
    def forward(self, pair):
        a, b = pair.values() if isinstance(pair, dict) else pair
        return super().forward(a, b)


class Items(Dataset):
    def __init__(self, form):
        self.form = form

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self.form(X[index], X[-index]), Y[index]


def as_tuple(a, b):
    return a, b


def as_dict(a, b):
    return {"a": a, "b": b}


CALLS = {
    "one by one": (Two, as_tuple, lambda module, given: module(*given)),
    "into *args": (Rest, as_tuple, lambda module, given: module(*given)),
    "by name": (Two, as_dict, lambda module, given: module(**given)),
    "by name, all optional": (Optional, as_dict, lambda module, given: module(**given)),
    "a tuple as one": (Pair, as_tuple, lambda module, given: module(given)),
    "a dict as one": (Pair, as_dict, lambda module, given: module(given)),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_weights_are_torchs(name, tmp_path):
    make, form, call = CALLS[name]
    module = make()
    theirs = copy.deepcopy(module)
    Trainer(module, Items(form), None, config(tmp_path), loss=nn.MSELoss()).train()
    train_in_torch(theirs, Items(form), lambda module, batch: F.mse_loss(call(module, batch[0]), batch[1]))
    assert_torchs(theirs, module)
