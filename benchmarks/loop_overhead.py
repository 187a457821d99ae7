"""What the loop adds to the compiled step: `python -m benchmarks.loop_overhead [--config configs/digits.yaml]`.

The same program runs bare, over the batches of one epoch that lie on the device, and through the whole loop: reading
the dataset, placing batches, metrics, log, progress. Both sides alternate; the ratio is that of their medians.
"""

import json
import statistics
import tempfile
import time

import jax

from benchmarks import parser, save
from jaxtrain import config_io
from jaxtrain.runtime import host_memory
from jaxtrain.train.trainer import Trainer


def make(config: str, folder: str, overrides: list[str]) -> Trainer:
    settings = [f"run.dir={folder}", "run.quiet=true", "evaluation.every_epochs=null"]
    task, resolved = config_io.load(config, [*settings, *overrides])
    return Trainer(config=resolved, task=task)


class Bare:
    """The compiled step in a tight loop on batches that lie on the device."""

    def __init__(self, trainer: Trainer):
        self.program, self.hyper = trainer.program.train_step(), trainer.program.hyper()
        self.columns = trainer.program.columns(trainer.train_loader)
        calls = [(step, 1) for step in range(trainer.steps_per_epoch)]
        self.batches = [batch for _, _, batch in trainer.train_loader.batches(calls)]
        self.state = trainer.state
        self.steps_per_s(len(self.batches))  # compiled, and every batch seen once

    @host_memory.kept()
    def steps_per_s(self, steps: int) -> float:
        started = time.perf_counter()
        for step in range(steps):
            batch = self.batches[step % len(self.batches)]
            self.state, _ = self.program(self.state, batch, self.hyper, self.columns)
        jax.block_until_ready(self.state)
        return steps / (time.perf_counter() - started)


def loop_steps_per_s(trainer: Trainer) -> float:
    """Steps per second of a whole run, without compiling, evaluating and saving."""
    trainer.train()
    summary = json.loads((trainer.folder / "summary.json").read_text())
    return summary["throughput"]["samples_per_s"] / trainer.config.data.batch_size


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--config", default="configs/digits.yaml")
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("overrides", nargs="*")
    arguments = p.parse_args()
    sides: dict[str, list[float]] = {"bare": [], "loop": []}
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"train.steps={arguments.steps}", *arguments.overrides]
        bare = Bare(make(arguments.config, f"{folder}/bare", overrides))
        for round_ in range(arguments.rounds):
            sides["loop"].append(loop_steps_per_s(make(arguments.config, f"{folder}/{round_}", overrides)))
            sides["bare"].append(bare.steps_per_s(arguments.steps))
    ratio = statistics.median(sides["loop"]) / statistics.median(sides["bare"])
    for name, values in sides.items():
        spread = f"{min(values):.1f} to {max(values):.1f}"
        print(f"{name}: {statistics.median(values):.1f} steps/s (median of {len(values)}, {spread})")
    print(f"loop / bare: {ratio:.3f}")
    save({**sides, "ratio": ratio}, arguments.json)


if __name__ == "__main__":
    main()
