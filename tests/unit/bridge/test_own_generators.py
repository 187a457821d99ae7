"""Generators and shared memory that a dataset holds itself: told before the run or at a resume, not lost in silence."""

import multiprocessing

import numpy as np
import pytest
import torch
from flax import nnx
from torch.utils.data import DataLoader, Dataset

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


def trainer(folder, train, validation=None, steps=4) -> Trainer:
    config = TrainingConfig(
        run={"dir": str(folder), "quiet": True},
        data={"batch_size": 4, "shuffle": False},
        shard={"devices": 1},
        train={"steps": steps},
        evaluation={"every_epochs": None},
        tracking={"tensorboard": False},
    )
    return Trainer(Model(), train, validation, config, loss=lambda model, batch, rngs: (model.w[...] - batch["0"]) ** 2)


def test_a_dataset_that_holds_its_loaders_generator_is_refused():
    generator = torch.Generator()
    with pytest.raises(UserError, match=r"dataset\.held\[0\] is the DataLoader's generator too"):
        as_source(DataLoader(Holding([generator]), 4, shuffle=True, generator=generator))


def test_a_generator_that_two_loaders_share_is_warned_of(tmp_path):
    shared = [DataLoader(Holding(None), 4, shuffle=train, generator=torch.Generator()) for train in (True, False)]
    trainer(tmp_path / "apart", *shared).train()
    generator = torch.Generator()
    shared = [DataLoader(Holding(None), 4, shuffle=train, generator=generator) for train in (True, False)]
    trainer(tmp_path / "shared", *shared).train()
    words = "the training and the validation DataLoader share a generator"
    assert words in (tmp_path / "shared" / "train.log").read_text()
    assert words not in (tmp_path / "apart" / "train.log").read_text()


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
