"""A small network with BatchNorm on planted data, to be trained by several processes."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain import Loss, Task, nn
from jaxtrain.data.sources import ArraySource
from jaxtrain.losses import weighted_mean


class Net(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.fc1, self.bn1 = nn.Linear(4, 8, rngs=rngs), nn.BatchNorm(8)
        self.fc2 = nn.Linear(8, 1, rngs=rngs)

    def __call__(self, x, rngs=None, valid=None):
        return self.fc2(jax.nn.relu(self.bn1(self.fc1(x), rngs=rngs, valid=valid)))[:, 0]


def build_data(config, split):
    if split not in ("train", "validation"):
        return None
    x = np.random.default_rng(len(split)).normal(2, 3, (74, 4)).astype(np.float32)  # the last batch is half padding
    return ArraySource({"x": x, "y": np.sin(x).sum(1)})


def loss(model, batch, config, rngs):
    error = jnp.square(model(batch["x"], rngs, batch["valid"]) - batch["y"])
    return Loss(*weighted_mean(error, batch["valid"]))


TASKS = {
    "train": Task(
        build_model=lambda config, rngs: Net(rngs=rngs), build_data=build_data, loss=loss, couples_samples=True
    )
}
