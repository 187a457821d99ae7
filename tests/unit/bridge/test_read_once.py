"""A dataset is read as torch's loader reads it: once, by `__getitems__` where it has that, by its sampler's keys."""

import numpy as np
import pytest
import torch
from flax import nnx
from torch.utils.data import DataLoader, Dataset, IterableDataset

from jaxtrain import Trainer, TrainingConfig


class Mean(torch.nn.Module):
    """Its loss is the mean squared distance of one number to the samples."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return ((self.w - x) ** 2).mean()


class FlaxMean(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(np.zeros((), np.float32))


class Reads(Dataset):
    """Ten numbers; `reads` lists which were asked for."""

    def __init__(self):
        self.reads = []

    def __len__(self):
        return 10

    def __getitem__(self, index):
        self.reads.append(index)
        return torch.tensor(float(index))


class Together(Dataset):
    """Gives samples by `__getitems__` alone, each with the batch's mean added."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        raise RuntimeError("torch's loader does not ask for one sample")

    def __getitems__(self, indices):
        values = torch.tensor([float(index) for index in indices])
        return list(values + values.mean())


class TogetherWithNoise(Together):
    def __getitems__(self, indices):
        np.random.randn()
        return super().__getitems__(indices)


class Keyed(Dataset):
    """Asked for by (number, factor); has no length."""

    def __getitem__(self, key):
        number, factor = key
        return torch.tensor(float(number * factor))


class ReadyMade(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return torch.arange(50.0) + index


class Once(IterableDataset):
    """Eight numbers that come once."""

    def __init__(self):
        self.numbers = (torch.tensor(float(i)) for i in range(8))

    def __iter__(self):
        return self.numbers


class Passes(IterableDataset):
    """Numbers times the pass over it."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return iter([torch.tensor(float(i * self.passes)) for i in range(8)])

    def __len__(self):
        return 8


class Counting:
    """Collates to the number of the call."""

    calls = 0

    def __call__(self, items):
        self.calls += 1
        return torch.full((len(items),), float(self.calls))


def config(folder, **train):
    return TrainingConfig(
        run={"dir": str(folder), "quiet": True},
        data={"batch_size": 4, "shuffle": False},
        shard={"devices": 1},
        train=train or {"epochs": 1},
        optim={"name": "sgd", "lr": 0.1, "weight_decay": 0, "clip_norm": None, "schedule": {"name": "constant"}},
        evaluation={"every_epochs": None},
        tracking={"tensorboard": False},
    )


def trained(folder, data, module=None, **train):
    module = Mean() if module is None else module
    loss = None if isinstance(module, Mean) else lambda model, batch, rngs: (model.w[...] - batch["0"]) ** 2
    Trainer(module, data, None, config(folder, **train), loss=loss).train()
    return float(module.w.detach()) if isinstance(module, Mean) else float(module.w[...])


def in_torch(batches):
    w = 0.0
    for batch in batches:
        w -= 0.1 * float(np.mean(2 * (w - np.asarray(batch, float))))
    return w


HALVES = (range(4), range(4, 8))


@pytest.mark.parametrize("collate", [None, torch.stack])
def test_a_run_reads_every_sample_of_an_epoch_once(collate, tmp_path):
    data = Reads()
    trained(tmp_path, DataLoader(data, 4, collate_fn=collate))
    assert sorted(data.reads) == list(range(10))


def test_a_stream_that_comes_once_is_trained_on_from_its_first_sample(tmp_path):
    assert trained(tmp_path, DataLoader(Once(), 4), steps=2) == pytest.approx(in_torch(HALVES))


def test_a_stream_that_counts_its_passes_counts_those_of_training(tmp_path):
    wanted = in_torch([*HALVES, *(2 * np.array(half) for half in HALVES)])
    assert trained(tmp_path, DataLoader(Passes(), 4), epochs=2) == pytest.approx(wanted)


@pytest.mark.parametrize("kind", [Together, TogetherWithNoise])
@pytest.mark.parametrize("collate", [None, torch.stack])
def test_samples_come_by_getitems_where_a_dataset_has_it(kind, collate, tmp_path):
    wanted = in_torch(np.array(batch) + np.mean(batch) for batch in (*HALVES, range(8, 10)))
    assert trained(tmp_path, DataLoader(kind(), 4, collate_fn=collate), FlaxMean()) == pytest.approx(wanted)


def test_a_sampler_may_give_keys_and_the_dataset_no_length(tmp_path):
    loader = DataLoader(Keyed(), 4, sampler=[(i, 2) for i in range(8)])
    assert trained(tmp_path, loader, FlaxMean()) == pytest.approx(in_torch(2 * np.array(half) for half in HALVES))


@pytest.mark.parametrize("kind", [Mean, FlaxMean])
def test_a_collate_function_with_a_state_is_called_once_for_every_batch(kind, tmp_path):
    wanted = in_torch(np.full(4, number) for number in (1.0, 2.0))
    assert trained(tmp_path, DataLoader(range(8), 4, collate_fn=Counting()), kind()) == pytest.approx(wanted)


def test_batches_that_are_made_already_decide_their_size(tmp_path):
    wanted = in_torch(np.arange(50.0) + i for i in range(3))
    assert trained(tmp_path, DataLoader(ReadyMade(), batch_size=None), FlaxMean()) == pytest.approx(wanted)
