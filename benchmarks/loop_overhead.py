"""What the loop adds to the compiled step: `python -m benchmarks.loop_overhead`.

The same program is called bare, on one batch again and again, and through the whole loop (data, metrics, log). What
the loop does on the host overlaps an accelerator's step; on a CPU it adds up.
"""

import argparse
import json
import pathlib
import tempfile
import time

import jax

from jaxtrain import config_io
from jaxtrain.train.trainer import Trainer


def make(config: str, folder: str, overrides: list[str]) -> Trainer:
    settings = [f"run.dir={folder}", "run.quiet=true", "tracking.tensorboard=false", "evaluation.every_epochs=null"]
    task, resolved = config_io.load(config, [*settings, "train.log_every_steps=100", *overrides])
    return Trainer(config=resolved, task=task)


def bare_ms(trainer: Trainer, steps: int) -> float:
    """Milliseconds of one call of the compiled step on a batch that lies on the device."""
    program, hyper, columns = trainer.train_step(), trainer.hyper(), trainer.columns(trainer.train_loader)
    batch = next(trainer.train_loader.batches([(0, 1)]))[2]
    state, _ = program(trainer.state, batch, hyper, columns)
    jax.block_until_ready(state)
    started = time.perf_counter()
    for _ in range(steps):
        state, _ = program(state, batch, hyper, columns)
    jax.block_until_ready(state)
    return (time.perf_counter() - started) / steps * 1e3


def loop_ms(trainer: Trainer) -> float:
    """Milliseconds of one step of the loop, without compiling, evaluating and saving."""
    trainer.train()
    summary = json.loads((trainer.folder / "summary.json").read_text())
    return trainer.config.data.batch_size / summary["throughput"]["samples_per_s"] * 1e3


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--config", default="configs/digits_tiny.yaml")
    p.add_argument("--steps", type=int, default=1000)
    p.add_argument("--json", metavar="F")
    p.add_argument("overrides", nargs="*", default=["data.source=numpy", "data.placement=device"])
    arguments = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"train.steps={arguments.steps}", *arguments.overrides]
        loop = loop_ms(make(arguments.config, f"{folder}/loop", overrides))
        bare = bare_ms(make(arguments.config, f"{folder}/bare", overrides), arguments.steps)
    print(f"bare step {bare:.3f} ms, in the loop {loop:.3f} ms: {loop - bare:.3f} ms for data, metrics and log")
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps({"bare_ms": bare, "loop_ms": loop}, indent=1))


if __name__ == "__main__":
    main()
