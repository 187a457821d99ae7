"""A task whose best learning rate is known to lie well above its default, for studies in the tests.

`python -m jaxtrain.tune` imports it by name: `task: tests.unit.tuning.small.train`.
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from pydantic import Field

from jaxtrain import Loss, Task, nn
from jaxtrain.config import Section
from jaxtrain.data.sources import ArraySource
from jaxtrain.losses import weighted_mean


class Model(Section):
    width: int = Field(8, ge=1)
    dropout: float = Field(0.1, ge=0, lt=1)


class LossSettings(Section):
    shrink: float = Field(0.01, ge=0)  # weight of the outputs' squares
    broken: bool = False  # raise, as a task with a fault does


class Net(nnx.Module):
    def __init__(self, config, *, rngs):
        self.fc1, self.fc2 = nn.Linear(3, config.width, rngs=rngs), nn.Linear(config.width, 1, rngs=rngs)
        self.dropout = nn.Dropout(config.dropout)

    def __call__(self, x, rngs=None):
        return self.fc2(self.dropout(jnp.tanh(self.fc1(x)), rngs))[:, 0]


def build_data(config, split):
    if split not in ("train", "validation"):
        return None
    x = np.random.default_rng(len(split)).normal(size=(64, 3)).astype(np.float32)
    return ArraySource({"x": x, "y": np.sin(x).sum(1)})


def loss(model, batch, config, rngs):
    if config.loss.broken:
        raise RuntimeError("this trial is broken")
    y = model(batch["x"], rngs)
    error, weight = weighted_mean(jnp.square(y - batch["y"]), batch["valid"])
    size, _ = weighted_mean(jnp.square(y), batch["valid"])
    return Loss(error + (config.loss.shrink * size if rngs is not None else 0.0), weight)


TASKS = {
    "train": Task(
        sections={"model": Model, "loss": LossSettings},
        build_model=lambda config, rngs: Net(config.model, rngs=rngs),
        build_data=build_data,
        loss=loss,
        traced_hparams=("seed", "model.dropout", "loss.shrink"),
    )
}

CONFIG = """
task: tests.unit.tuning.small.train
data: {batch_size: 16}
optim: {lr: 1.0e-3, schedule: {name: cosine}}
train: {epochs: 10}
shard: {devices: 1}
tracking: {tensorboard: false}
"""
