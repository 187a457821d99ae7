"""Every task with several processes against one: `python -m tests.chaos.tasks_in_processes [--tasks ...]`.

The loss curve over 50 steps to 1e-5 relative, and the metrics of every evaluation to as much. Plain SGD at 0.01: Adam
divides by the root of a moment that may be rounding only, and so turns a difference of 1e-7 into one of the learning
rate. Where a task couples the samples of a batch, its batch is the same on any number of processes too.

With --resume every run is also taken back to its checkpoint at half of the steps, started again, and must give the
same numbers bit for bit.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Mapping

from tests.chaos import together

STRATEGIES = ("ddp", "fsdp")
LIMIT = 1e-5


def settings(steps: int) -> tuple[str, ...]:
    from tests.contract.tasks import PLAIN

    every = ("train.log_every_steps=1", "evaluation.every_epochs=null", f"evaluation.every_steps={steps // 2}")
    kept = (f"checkpoint.every_steps={steps // 2}", "checkpoint.keep_last=2")
    return (f"train.steps={steps}", "data.batch_size=8", "data.eval_batch_size=8", *every, *kept, *PLAIN)


def take_back(folder: pathlib.Path, step: int) -> pathlib.Path:
    """A copy of a run folder as if the run had ended after `step`."""
    copy = folder.with_name(f"{folder.name}-again")
    shutil.copytree(folder, copy)
    for checkpoint in (copy / "checkpoints").iterdir():
        if checkpoint.name.isdigit() and int(checkpoint.name) > step:
            shutil.rmtree(checkpoint)
    assert (copy / "checkpoints" / str(step)).is_dir(), f"{folder} holds no checkpoint at step {step}"
    return copy


def values(folder: pathlib.Path) -> list[tuple[int, str, dict[str, float]]]:
    """The losses of training and all metrics of evaluations."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    wanted = lambda line: line["values"] if line["split"] == "validation" else {"loss": line["values"]["loss"]}
    return [(line["step"], line["split"], wanted(line)) for line in lines]


def largest_difference(first: list, second: list, split: str) -> float:
    """Relative; of values below 1e-3 absolute, in units of 1e-3."""
    worst = 0.0
    assert [point[:2] for point in first] == [point[:2] for point in second]
    for a, b in zip(first, second, strict=True):
        for name, value in a[2].items() if a[1] == split else ():
            other = b[2][name]
            if value != other and not (value != value and other != other):
                worst = max(worst, abs(value - other) / max(abs(value), 1e-3))
    return worst


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Runs of every task under both strategies; their folders lie in `place`."""

    tasks: list[str]
    steps: int
    place: pathlib.Path

    def runs(self, count: int) -> dict[tuple[str, str], pathlib.Path]:
        """Folders of the runs with so many processes, by (task, strategy)."""
        pairs = itertools.product(self.tasks, STRATEGIES)
        return {(task, strategy): self.place / f"{task}-{count}-{strategy}" for task, strategy in pairs}

    def train(self, count: int, folders: Mapping[tuple[str, str], pathlib.Path]) -> None:
        from tests.contract.tasks import tiny_file

        own = lambda strategy, folder: (f"run.dir={folder}", f"shard.strategy={strategy}")
        jobs = [(tiny_file(t), (*settings(self.steps), *own(s, folder))) for (t, s), folder in folders.items()]
        together.train(count, jobs, self.place)

    def differ(self, count: int) -> list[bool]:
        """Which runs with so many processes, just trained, are not as one process' run with ddp."""
        found = []
        for (task, strategy), folder in self.runs(count).items():
            ours, theirs = values(self.runs(1)[task, "ddp"]), values(folder)
            curve, metrics = (largest_difference(ours, theirs, split) for split in ("train", "validation"))
            found.append(max(curve, metrics) > LIMIT)
            said = "  DIFFERS" if found[-1] else ""
            print(f"{task} {count} x {strategy}: loss {curve:.1e}, evaluation {metrics:.1e}{said}", flush=True)
        return found

    def resume(self, count: int) -> list[bool]:
        """Which runs with so many processes, taken back to their middle, do not go on as before."""
        runs = self.runs(count)
        copies = {key: take_back(folder, self.steps // 2) for key, folder in runs.items()}
        self.train(count, copies)
        found = []
        for (task, strategy), folder in runs.items():
            pair = values(folder), values(copies[task, strategy])
            found.append(max(largest_difference(*pair, split) for split in ("train", "validation")) > 0)
            said = "  DIFFERS" if found[-1] else " with the same bits"
            print(f"{task} {count} x {strategy}: resumed at step {self.steps // 2}{said}", flush=True)
        return found


def main(argv: list[str] | None = None) -> int:
    from tests.contract.tasks import TASKS  # processes import this module, and must find JAX untouched

    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, metavar="TASK")
    p.add_argument("--steps", type=int, default=50)
    p.add_argument("--processes", nargs="+", type=int, default=[2, 4])
    p.add_argument("--resume", action="store_true", help="go on from the middle too")
    arguments = p.parse_args(argv)
    bad: list[bool] = []
    with tempfile.TemporaryDirectory() as temporary:
        matrix = Matrix(arguments.tasks, arguments.steps, pathlib.Path(temporary))
        alone = matrix.runs(1)
        matrix.train(1, {key: folder for key, folder in alone.items() if key[1] == "ddp"})
        for count in arguments.processes:
            matrix.train(count, matrix.runs(count))
            bad += matrix.differ(count) + (matrix.resume(count) if arguments.resume else [])
    print(f"{len(bad) - sum(bad)} of {len(bad)} runs hold over {arguments.steps} steps: equal to {LIMIT:g}")
    return 1 if any(bad) else 0


if __name__ == "__main__":
    sys.exit(main())
