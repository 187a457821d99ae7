"""Optimizer steps per second with one and with several steps per dispatch: `python -m benchmarks.steps_per_call`.

A 2-layer MLP, 32 wide, on 64 samples a step, its data on the device: there the dispatch costs more than the step.
"""

import json
import pathlib
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import parser, save
from jaxtrain import Loss, Task, Trainer, TrainingConfig, nn


class Mlp(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.fc1 = nn.Linear(width, width, rngs=rngs)
        self.fc2 = nn.Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        return self.fc2(jax.nn.relu(self.fc1(x)))[:, 0]


def loss(model, batch, config, rngs) -> Loss:
    squares = jnp.square(model(batch["x"]) - batch["y"]) * batch["valid"]
    count = batch["valid"].sum()
    return Loss(squares.sum() / jnp.maximum(count, 1), count)


def steps_per_s(steps_per_call: int, steps: int, width: int = 32, batch_size: int = 64) -> tuple[float, dict]:
    """Optimizer steps per second through the whole loop, after compiling; and the final parameters."""
    x = np.random.default_rng(0).normal(size=(64 * batch_size, width)).astype(np.float32)
    task = Task(build_model=lambda config, rngs: Mlp(width, rngs=rngs), loss=loss)
    with tempfile.TemporaryDirectory() as folder:
        config = TrainingConfig(
            run={"dir": str(pathlib.Path(folder) / "run"), "quiet": True},
            data={"batch_size": batch_size},
            train={"steps": steps, "steps_per_call": steps_per_call, "log_every_steps": 1000},
            evaluation={"every_epochs": None},
            tracking={"tensorboard": False},
            shard={"devices": 1},
        )
        trainer = Trainer(None, {"x": x, "y": x.sum(1)}, None, config, task=task)
        started = time.perf_counter()
        trainer.train()
        summary = json.loads((trainer.folder / "summary.json").read_text())
        rate = summary["throughput"]["samples_per_s"] / batch_size
        seconds = time.perf_counter() - started
        return rate, {"seconds": seconds, "params": jax.device_get(trainer.state.params)}


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--steps", type=int, default=6400)
    p.add_argument("--counts", type=int, nargs="+", default=[1, 4, 16, 64])
    arguments = p.parse_args()
    rates, params = {}, {}
    for count in arguments.counts:
        rates[count], found = steps_per_s(count, arguments.steps)
        params[count] = found["params"]
        first = arguments.counts[0]
        same = all(np.array_equal(params[first][key], value) for key, value in params[count].items())
        ratio = rates[count] / rates[first]
        print(f"steps_per_call {count:3d}: {rates[count]:8.0f} steps/s, {ratio:4.1f} x, same bits: {same}")
    save({"steps_per_s": rates}, arguments.json)


if __name__ == "__main__":
    main()
