"""What a checkpoint costs: `python -m benchmarks.checkpoint`.

The stall is the time for which `save` keeps the loop from its next step; the write goes on in the background. Beside
it, a plain file write of as many bytes, flushed to the disk, and a training step of the same model.
"""

import os
import pathlib
import statistics
import tempfile
import time

import jax
import numpy as np

from benchmarks import parser, save
from jaxtrain import config_io
from jaxtrain.runtime import host_memory
from jaxtrain.train.checkpoint.checkpoints import Checkpoints
from jaxtrain.train.trainer import Trainer


@host_memory.kept()
def main() -> None:
    p = parser(__doc__)
    p.add_argument("--config", default="configs/digits.yaml")
    p.add_argument("--saves", type=int, default=7)
    p.add_argument(
        "overrides", nargs="*", default=["model.embed_dim=512", "model.depth=6", "optim.ema_decay=null"],
        help="default: 18.9 million parameters, 227 MB of state",
    )  # fmt: skip
    arguments = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        task, config = config_io.load(arguments.config, [f"run.dir={folder}", "run.quiet=true", *arguments.overrides])
        trainer = Trainer(config=config, task=task)
        step_s = _step_seconds(trainer)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(trainer.state) if hasattr(leaf, "nbytes"))
        stalls, writes, plain = [], [], []
        checkpoints = Checkpoints(pathlib.Path(folder) / "checkpoints", 1, 0, "loss", "min")
        for number in range(1, arguments.saves + 2):
            started = time.perf_counter()
            checkpoints.save(trainer.state, number, {"step": number, "metrics": {}})
            stalls.append(time.perf_counter() - started)
            checkpoints.wait()
            writes.append(time.perf_counter() - started)
            plain.append(_plain_seconds(pathlib.Path(folder) / "plain", size))
    first, result = stalls[0], {"bytes": size, "step_s": step_s}  # the first save sets threads and folders up
    median = lambda values: statistics.median(values[1:])
    result |= {"first_stall_s": first, "stall_s": median(stalls), "stalls_s": stalls[1:]}
    result |= {"save_mb_per_s": size / median(writes) / 1e6, "plain_mb_per_s": size / median(plain) / 1e6}
    print(
        f"{size / 1e6:.0f} MB of state: stall {median(stalls) * 1e3:.1f} ms a save "
        f"({min(stalls[1:]) * 1e3:.1f} to {max(stalls[1:]) * 1e3:.1f}; the first {first * 1e3:.1f}), "
        f"{median(stalls) / step_s:.2f} of a step of {step_s * 1e3:.1f} ms\n"
        f"written at {result['save_mb_per_s']:.0f} MB/s, a plain file at {result['plain_mb_per_s']:.0f} MB/s"
    )
    save(result, arguments.json)


def _step_seconds(trainer: Trainer, steps: int = 5) -> float:
    program, hyper, columns = (
        trainer.program.train_step(),
        trainer.program.hyper(),
        trainer.program.columns(trainer.train_loader),
    )
    batch = next(trainer.train_loader.batches([(0, 1)]))[2]
    seconds = []
    for _ in range(steps + 1):
        started = time.perf_counter()
        trainer.state, _ = program(trainer.state, batch, hyper, columns)
        jax.block_until_ready(trainer.state)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def _plain_seconds(path: pathlib.Path, size: int) -> float:
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    started = time.perf_counter()
    with path.open("wb") as file:
        file.write(data.data)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
