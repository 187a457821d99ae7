"""Small runs for the engine's tests."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain import Loss, Task, Trainer, TrainingConfig, nn

SAMPLES, WIDTH = 48, 8


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.fc = nn.Linear(width, width, rngs=rngs)
        self.norm = nn.BatchNorm(width)
        self.dropout = nn.Dropout(0.2)

    def __call__(self, x, rngs=None):
        return x + self.dropout(nn.gelu(self.norm(self.fc(x), rngs=rngs)), rngs)


class Network(nnx.Module):
    """Dropout, running statistics and blocks: all that a training step must carry."""

    def __init__(self, depth=2, *, rngs):
        self.stem = nn.Linear(4, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(WIDTH, rngs) for _ in range(depth)])
        self.head = nn.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x, rngs=None):
        x = self.stem(x)
        for block in self.blocks:
            x = nn.block(block, x, rngs=rngs)
        return self.head(x)[:, 0].astype(jnp.float32)


class Plain(nnx.Module):
    """Two layers without noise: what a sample does depends on no other."""

    def __init__(self, *, rngs):
        self.fc1 = nn.Linear(4, WIDTH, rngs=rngs)
        self.fc2 = nn.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x, rngs=None):
        return self.fc2(jnp.tanh(self.fc1(x)))[:, 0].astype(jnp.float32)


SAVING = {"checkpoint__every_steps": 2, "train__steps": 8, "evaluation__every_epochs": None}


def data(samples=SAMPLES):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(samples, 4)).astype(np.float32)
    return {"x": x, "y": np.sin(x).sum(1).astype(np.float32)}


def loss(model, batch, config, rngs):
    """Weighted squares: samples count by 1 + |y|, so that micro-batches differ in weight."""
    share = batch["valid"] * (1 + jnp.abs(batch["y"]))
    weight = share.sum()
    squares = jnp.square(model(batch["x"], rngs=rngs) - batch["y"])
    return Loss((squares * share).sum() / jnp.maximum(weight, 1e-6), weight, {"error": jnp.sqrt(squares.mean())})


def task(model=Plain, **options):
    return Task(build_model=lambda config, rngs: model(rngs=rngs), loss=loss, **options)


def trainer(folder, chosen=None, samples=None, **settings):
    """A trainer of the small task; settings by dotted name, as train__steps=8."""
    defaults = {
        "run": {"dir": str(folder), "quiet": True},
        "data": {"batch_size": 8},
        "tracking": {"tensorboard": False},
        "train": {"steps": 8, "log_every_steps": 1},
        "evaluation": {"every_epochs": None},
        "optim": {"lr": 1e-2, "schedule": {"name": "constant"}},
        "shard": {"devices": 1},
    }
    for name, value in settings.items():
        *sections, leaf = name.split("__")
        target = defaults
        for section in sections:
            target = target.setdefault(section, {})
        target[leaf] = value
    given = data() if samples is None else samples
    return Trainer(None, given, None, TrainingConfig(**defaults), task=chosen or task())


def trained(folder, chosen=None, samples=None, **settings):
    made = trainer(folder, chosen, samples, **settings)
    made.train()
    return made


def arrays(made):
    state = made.state
    return jax.device_get({**state.params, **state.frozen, **state.buffers})


def points(folder, split="train"):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{"step": line["step"], **line["values"]} for line in lines if line["split"] == split]


def assert_same_bits(first, second):
    assert first.keys() == second.keys()
    for key, value in first.items():
        np.testing.assert_array_equal(value, second[key], err_msg=key)


def difference(first, second):
    """Relative L2 over all arrays together."""
    total = sum(float(np.square(np.subtract(first[k], second[k], dtype=float)).sum()) for k in first)
    return (total / sum(float(np.square(v, dtype=float).sum()) for v in second.values())) ** 0.5
