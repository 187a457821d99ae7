"""Datasets whose tensors have a class of the user's own: plain ones train the same, or the module is refused."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, default_collate

from jaxtrain import Trainer, UserError
from tests.e2e.trainings import X, Y, check, config, mlp


class Scaled(torch.Tensor):
    def scaled(self):
        return self * 3


class Samples(Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index].as_subclass(Scaled), Y[index]


class AsksForTheClass(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        return self.net(x.scaled() if isinstance(x, Scaled) else x)


class CallsItsMethod(AsksForTheClass):
    def forward(self, x):
        return self.net(x.scaled())


def as_loader():
    return DataLoader(Samples(), 8, collate_fn=lambda items: default_collate(items))


@pytest.mark.parametrize("data", [Samples, as_loader])
@pytest.mark.parametrize("kind", [AsksForTheClass, CallsItsMethod])
def test_a_module_that_needs_the_class_is_refused(kind, data, tmp_path):
    with pytest.raises(UserError, match=r"Scaled.*a compiled step takes plain tensors: call its methods in the Datas"):
        Trainer(kind(), data(), None, config(tmp_path), loss=nn.MSELoss())


def test_a_module_that_does_not_ask_for_the_class_trains_to_torchs_weights(tmp_path):
    check(tmp_path, mlp(), Samples(), nn.MSELoss(), lambda module, batch: mse_loss(module(batch[0]), batch[1]))
