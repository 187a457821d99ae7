"""A Dataset that returns the same memory for every sample gives torch's batches."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from jaxtrain import Trainer, TrainingConfig


class Refills(Dataset):
    """Returns one object, whose parts are written or replaced at every call."""

    def __init__(self, kind):
        self.kind, self.memory, self.item = kind, np.zeros(3, np.float32), {}

    def __len__(self):
        return 16

    def __getitem__(self, index):
        if self.kind == "dict":
            self.item["x"], self.item["y"] = np.full(3, index, np.float32), float(index)
            return self.item
        self.memory[:] = index
        return (self.memory, float(index)) if self.kind == "array" else (torch.from_numpy(self.memory), float(index))


class Model(nn.Linear):
    def __init__(self):
        super().__init__(3, 1)

    def forward(self, x, y):
        return super().forward(x)


def loader_of(kind, folder, count=0):
    data = {"batch_size": 4, "shuffle": False, "num_workers": count}
    config = TrainingConfig(data=data, train={"steps": 4}, run={"dir": str(folder)}, shard={"devices": 1})
    model = Model() if kind == "dict" else nn.Linear(3, 1)
    return Trainer(model, Refills(kind), None, config, loss=lambda output, batch: output.mean()).train_loader


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("kind", ["array", "dict", "tensor"])
def test_every_row_of_a_batch_is_the_last_sample_as_in_torch(kind, count, tmp_path):
    loader = loader_of(kind, tmp_path, count)
    for step, theirs in enumerate(DataLoader(Refills(kind), 4, num_workers=count)):
        ours = loader.host_batch(step)
        for name, part in theirs.items() if kind == "dict" else zip("01", theirs, strict=True):
            np.testing.assert_array_equal(ours[name], part.numpy(), err_msg=f"batch {step}, {name}")


def test_a_dataset_that_refills_its_memory_is_told(tmp_path, caplog):
    loader_of("array", tmp_path)
    assert caplog.text.count("all rows of a batch hold its last sample; return a copy") == 1
