"""A Python loop around jaxtrain.compile beside the Trainer's own: `python -m benchmarks.own_loop --rounds 5`.

The same small network, batches and optimizer in both; the network computes for some tens of microseconds, so that the
loops show. Prints the median of alternating rounds and the spread.
"""

import statistics
import tempfile
import time

import numpy as np
import torch

import jaxtrain
from benchmarks import parser
from jaxtrain import Trainer, TrainingConfig


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))


def main() -> None:
    p = parser(__doc__, figures=False)
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--rounds", type=int, default=5)
    arguments = p.parse_args()
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((arguments.steps * 8, 16), np.float32))
    y = torch.from_numpy(rng.standard_normal((arguments.steps * 8, 4), np.float32))
    data = torch.utils.data.TensorDataset(x, y)
    loader = list(torch.utils.data.DataLoader(data, 8))

    module = network()
    loss = lambda module, batch: torch.nn.functional.mse_loss(module(batch[0]), batch[1])
    step = jaxtrain.compile(module, loss, torch.optim.AdamW(module.parameters(), 1e-3), wait=True)

    def own() -> float:
        began = time.perf_counter()
        for batch in loader:
            last = step(batch)
        float(last)
        return (time.perf_counter() - began) / len(loader)

    def trainers() -> float:
        with tempfile.TemporaryDirectory() as folder:
            config = TrainingConfig(
                run={"dir": folder, "quiet": True},
                data={"batch_size": 8, "shuffle": False},
                train={"steps": 2 * arguments.steps, "log_every_steps": arguments.steps},
                evaluation={"every_epochs": None},
                tracking={"tensorboard": False},
                optim={"schedule": {"name": "constant"}},
            )
            trainer = Trainer(network(), data, None, config, loss=torch.nn.MSELoss())
            began = time.perf_counter()
            trainer.train()
            whole = time.perf_counter() - began
            short = TrainingConfig(**{**config.model_dump(exclude_unset=True), "train": {"steps": arguments.steps}})
            short = short.model_copy(update={"run": short.run.model_copy(update={"dir": folder + "/short"})})
            other = Trainer(network(), data, None, short, loss=torch.nn.MSELoss())
            began = time.perf_counter()
            other.train()
            return (whole - (time.perf_counter() - began)) / arguments.steps

    own()
    rounds = [(own(), trainers()) for _ in range(arguments.rounds)]
    ours, theirs = (statistics.median(times) * 1e6 for times in zip(*rounds, strict=True))
    extra = sorted((a - b) * 1e6 for a, b in rounds)
    print(f"a step in a loop of one's own: {ours:.0f} us; in the Trainer's: {theirs:.0f} us; ratio {ours / theirs:.2f}")
    print(f"difference per step: median {statistics.median(extra):.0f} us ({extra[0]:.0f} to {extra[-1]:.0f})")


if __name__ == "__main__":
    main()
