"""Generators and shared memory that a dataset holds itself: told before the run or at a resume, not lost in silence."""

import multiprocessing

import numpy as np
import pytest
import torch
from flax import nnx
from torch.utils.data import DataLoader, Dataset, RandomSampler

from jaxtrain import Trainer, TrainingConfig, UserError
from jaxtrain.data.sample_reader import Reader
from jaxtrain.data.sources import as_source
from jaxtrain.data.workers import ProcessPool
from torch_bridge.datasets.own_generators import generators_in


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(np.zeros((), np.float32))


class Holding(Dataset):
    """Eight numbers; holds something."""

    def __init__(self, held):
        self.held = held

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor(float(index))


def trainer(folder, train, validation=None, steps=4, every=None) -> Trainer:
    config = TrainingConfig(
        run={"dir": str(folder), "quiet": True},
        data={"batch_size": 4, "shuffle": False},
        shard={"devices": 1},
        train={"steps": steps},
        evaluation={"every_epochs": None, "every_steps": every},
        tracking={"tensorboard": False},
    )
    return Trainer(Model(), train, validation, config, loss=lambda model, batch, rngs: (model.w[...] - batch["0"]) ** 2)


def test_a_dataset_that_holds_its_loaders_generator_is_refused():
    generator = torch.Generator()
    with pytest.raises(UserError, match=r"dataset\.held\[0\] is the DataLoader's generator too"):
        as_source(DataLoader(Holding([generator]), 4, shuffle=True, generator=generator))


class Noting:
    """A dataset that notes which samples are read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return 10

    def __getitem__(self, index):
        self.read.append(index)
        return np.float32(index)


def sharing(replacement=False):
    """A training and a validation loader with one generator."""
    train, validation, generator = Noting(), Noting(), torch.Generator().manual_seed(1)
    sampler = RandomSampler(train, replacement, generator=generator)
    return [
        DataLoader(train, 4, sampler=sampler, generator=generator),
        DataLoader(validation, 4, shuffle=True, generator=generator),
    ]


@pytest.mark.parametrize(("replacement", "every"), [(False, 3), (False, 2), (True, 3)])
def test_loaders_that_share_a_generator_give_torchs_order_between_evaluations(tmp_path, replacement, every):
    loaders, (train, validation), step = sharing(replacement), sharing(replacement), 0
    for _ in range(3):
        for _ in train:
            step += 1
            if step % every == 0:
                list(validation)
    for steps in (5, 9):
        given = trainer(tmp_path, *loaders, steps=steps, every=every)
        loaders[0].dataset.read.clear()
        given.train()
    assert loaders[0].dataset.read[-10:] == train.dataset.read[-10:]


def test_an_order_that_evaluations_change_within_an_epoch_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"share a generator.*evaluate at the ends of epochs only"):
        trainer(tmp_path, *sharing(replacement=True), steps=9, every=2).train()


def test_a_resume_warns_of_generators_that_start_anew(tmp_path):
    for steps in (2, 4):
        trainer(tmp_path, Holding({"rng": np.random.default_rng(0)}), steps=steps).train()
    log = (tmp_path / "train.log").read_text()
    assert log.count("the data hold random generators of their own (dataset.held['rng']), which start anew") == 1


def test_the_global_generators_are_nobodys_own():
    held = [np.random, np.random.random_sample.__self__, torch.default_generator]
    assert generators_in(Holding(held), "dataset") == {}


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (lambda: torch.zeros(()).share_memory_(), r"a tensor in shared memory \(share_memory_\(\)\)"),
        (lambda: multiprocessing.Value("i", 0), "It holds a Value, Array, Lock or Queue of multiprocessing"),
    ],
)
def test_memory_that_workers_cannot_share_is_refused(held, words):
    pool = ProcessPool(Reader(as_source(Holding(held()))), 1, 60)
    with pytest.raises(UserError, match=words):
        pool.start()
