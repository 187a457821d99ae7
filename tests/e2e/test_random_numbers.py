"""Random numbers that datasets draw: the same in every run, whoever else draws in this process."""

import time

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch.utils import data

from jaxtrain import Trainer, TrainingConfig


class Net(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.zeros(()))


class Augmented(data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        time.sleep(0.001)  # as reading a file: threads change here
        return torch.tensor(index + np.random.randn() + torch.randn(()).item(), dtype=torch.float32)


class AugmentedStream(data.IterableDataset):
    def __iter__(self):
        return (Augmented()[i] for i in range(32))


def weight(folder, train, every_steps=None, stop=None):
    """The trained weight, and the losses of the evaluations, whose caller draws too."""
    drawn = []

    def after_evaluation(step, metrics):
        drawn.append(np.random.rand())
        return step == stop

    config = TrainingConfig(
        run={"dir": str(folder), "quiet": True},
        data={"batch_size": 8},
        train={"steps": 12, "log_every_steps": 1},
        optim={"name": "sgd", "lr": 0.05, "weight_decay": 0, "clip_norm": None, "schedule": {"name": "constant"}},
        evaluation={"every_steps": every_steps, "every_epochs": None},
        checkpoint={"every_steps": 6},
        tracking={"tensorboard": False},
    )
    np.random.seed(3)
    trainer = Trainer(Net(), train, Augmented(), config, loss=lambda m, b, r: (m.w[...] - b["0"]) ** 2)
    history = trainer.train(after_evaluation=after_evaluation)
    np.random.seed(3)
    assert drawn == np.random.rand(len(drawn)).tolist()
    return float(trainer.state.params["w"]), [entry["loss"] for entry in history["val_history"]]


@pytest.mark.parametrize("train", [Augmented(), AugmentedStream()], ids=["map-style", "iterable"])
def test_evaluations_resumes_and_the_users_own_draws_change_no_bit_of_a_run(tmp_path, train):
    whole = weight(tmp_path / "whole", train, every_steps=3)
    assert weight(tmp_path / "again", train, every_steps=3) == whole
    assert weight(tmp_path / "quiet", train)[0] == whole[0]
    weight(tmp_path / "stopped", train, every_steps=3, stop=6)
    assert weight(tmp_path / "stopped", train, every_steps=3) == whole
