"""A task whose model counts how often it was trained on each sample: what a run lost or repeated stands in its buffer.

SAMPLES in a torch Dataset, each knowing its number; `data.trouble` makes sample 13 raise, die or hang.
"""

from typing import Literal

import jax.numpy as jnp
import torch
from flax import nnx

from jaxtrain import Loss, Task, nn
from jaxtrain.config import DataConfig
from tests.unit.bridge.data_sets import Trouble
from torch_bridge.layouts import Buffer

SAMPLES = 44


class Data(DataConfig):
    trouble: Literal["raise", "die", "hang"] | None = None


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.tensor(float(index)), index


class Counter(nnx.Module):
    """seen: int32 [sample], training steps that held the sample."""

    def __init__(self, *, rngs):
        self.linear = nn.Linear(1, 1, rngs=rngs)
        self.seen = Buffer(jnp.zeros(SAMPLES, jnp.int32))

    def __call__(self, x):
        return self.linear(x[:, None] / SAMPLES)[:, 0]


def build_data(config, split):
    if split != "train":
        return None
    return Trouble(config.data.trouble) if config.data.trouble else Numbers()


def loss(model, batch, config, rngs):
    valid = batch["valid"]
    if "1" in batch:
        model.seen.set_value(model.seen[...].at[batch["1"]].add(valid.astype(jnp.int32)))
    count = valid.sum()
    return Loss(jnp.where(valid, jnp.square(model(batch["0"]) - 1), 0).sum() / jnp.maximum(count, 1), count)


TASKS = {
    "count": Task(
        sections={"data": Data},
        build_model=lambda config, rngs: Counter(rngs=rngs),
        build_data=build_data,
        loss=loss,
    )
}
