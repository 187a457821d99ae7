"""Every task with several processes against one: `python -m tests.chaos.tasks_in_processes [--tasks ...]`.

The loss curve over 50 steps to 1e-5 relative, and the metrics of every evaluation to as much; those that count
decisions to one sample, because two scores that are equal but for rounding may change places. Plain SGD at 0.01: Adam
divides by the root of a moment that may be rounding only, and so turns a difference of 1e-7 into one of the learning
rate. Where a task couples the samples of a batch, its batch is the same on any number of processes too.

The fMRI autoencoders take 16 samples and a rate of 1e-4, the world model one of 1e-3: at 0.01 one process whose initial
weights differ in their last bit goes another way too (`--last-bit --tasks fmri_autoencoder.head optim.lr=0.01`).

With --resume every run is also taken back to its checkpoint at half of the steps, started again, and must give the
same numbers bit for bit.
"""

import argparse
import dataclasses
import json
import pathlib
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping

from tests.chaos import together

STRATEGIES = ("ddp", "fsdp")
LIMIT = 1e-5
ONE_SAMPLE = 0.035  # of the 30 or more in the smallest validation split
DECIDED = re.compile(r"(^|_)(accuracy|auroc|em|f1|precision|recall|score)(_(macro|micro|weighted|binary))?$")
_CALM = ("data.batch_size=16", "optim.lr=1e-4")
OWN = {"fmri_autoencoder.gen1": _CALM, "fmri_autoencoder.head": _CALM, "hjepa.world_model": ("optim.lr=1e-3",)}


def settings(task: str, steps: int) -> tuple[str, ...]:
    from tests.contract.tasks import PLAIN

    every = ("train.log_every_steps=1", "evaluation.every_epochs=null", f"evaluation.every_steps={steps // 2}")
    kept = (f"checkpoint.every_steps={steps // 2}", "checkpoint.keep_last=2")
    return (
        f"train.steps={steps}",
        "data.batch_size=8",
        "data.eval_batch_size=8",
        *every,
        *kept,
        *PLAIN,
        *OWN.get(task, ()),
    )


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


def largest_differences(first: list, second: list) -> dict[str, float]:
    """Of the losses, of the metrics of evaluations (relative; of values below 1e-3 in units of 1e-3) and of those that
    count decisions (absolute)."""
    worst = {"loss": 0.0, "evaluation": 0.0, "decisions": 0.0}
    assert [point[:2] for point in first] == [point[:2] for point in second]
    for (_, split, ours), (_, _, theirs) in zip(first, second, strict=True):
        for name, value in ours.items():
            other = theirs[name]
            if value == other or (value != value and other != other):
                continue
            difference = abs(value - other)
            if split == "train":
                worst["loss"] = max(worst["loss"], difference / max(abs(value), 1e-3))
            elif DECIDED.search(name):
                worst["decisions"] = max(worst["decisions"], difference)
            else:
                worst["evaluation"] = max(worst["evaluation"], difference / max(abs(value), 1e-3))
    return worst


def told(worst: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.1e}" for name, value in worst.items() if value or name != "decisions")


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Runs of a task under both strategies; their folders lie in `place`. more: settings that win."""

    task: str
    steps: int
    place: pathlib.Path
    more: tuple[str, ...] = ()

    def runs(self, count: int) -> dict[str, pathlib.Path]:
        """Folders of the runs with so many processes, by strategy."""
        return {strategy: self.place / f"{self.task}-{count}-{strategy}" for strategy in STRATEGIES}

    def train(self, count: int, folders: Mapping[str, pathlib.Path]) -> None:
        together.train(count, [self.job(strategy, folder) for strategy, folder in folders.items()], self.place)

    def job(self, strategy: str, folder: pathlib.Path) -> together.Job:
        from tests.contract.tasks import tiny_file

        own = (f"run.dir={folder}", f"shard.strategy={strategy}")
        return tiny_file(self.task), (*settings(self.task, self.steps), *self.more, *own)

    def change_the_last_bit(self) -> None:
        """One process against one process whose initial weights differ in their last bit."""
        folder = self.place / f"{self.task}-changed"
        together.train(1, [self.job("ddp", folder)], self.place, last_bit=True)
        worst = largest_differences(values(self.runs(1)["ddp"]), values(folder))
        print(f"{self.task}, initial weights changed in their last bit: {told(worst)}", flush=True)

    def differ(self, count: int) -> list[bool]:
        """Which runs with so many processes, just trained, are not as one process' run with ddp."""
        found = []
        for strategy, folder in self.runs(count).items():
            worst = largest_differences(values(self.runs(1)["ddp"]), values(folder))
            found.append(max(worst["loss"], worst["evaluation"]) > LIMIT or worst["decisions"] > ONE_SAMPLE)
            print(f"{self.task} {count} x {strategy}: {told(worst)}{'  DIFFERS' if found[-1] else ''}", flush=True)
        return found

    def resume(self, count: int) -> list[bool]:
        """Which runs with so many processes, taken back to their middle, do not go on as before."""
        runs = self.runs(count)
        copies = {strategy: take_back(folder, self.steps // 2) for strategy, folder in runs.items()}
        self.train(count, copies)
        found = []
        for strategy, folder in runs.items():
            found.append(max(largest_differences(values(folder), values(copies[strategy])).values()) > 0)
            said = "  DIFFERS" if found[-1] else " with the same bits"
            print(f"{self.task} {count} x {strategy}: resumed at step {self.steps // 2}{said}", flush=True)
        return found


def main(argv: list[str] | None = None) -> int:
    from tests.contract.tasks import TASKS  # processes import this module, and must find JAX untouched

    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, metavar="TASK")
    p.add_argument("--steps", type=int, default=50)
    p.add_argument("--processes", nargs="+", type=int, default=[2, 4])
    p.add_argument("--resume", action="store_true", help="go on from the middle too")
    p.add_argument("--last-bit", action="store_true", help="instead: how far a change of the last bit goes")
    p.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that win")
    arguments = p.parse_intermixed_args(argv)
    bad: list[bool] = []
    with tempfile.TemporaryDirectory() as temporary:
        for task in arguments.tasks:
            matrix = Matrix(task, arguments.steps, pathlib.Path(temporary), tuple(arguments.overrides))
            matrix.train(1, {"ddp": matrix.runs(1)["ddp"]})
            if arguments.last_bit:
                matrix.change_the_last_bit()
                continue
            for count in arguments.processes:
                matrix.train(count, matrix.runs(count))
                bad += matrix.differ(count) + (matrix.resume(count) if arguments.resume else [])
    if arguments.last_bit:
        return 0
    print(f"{len(bad) - sum(bad)} of {len(bad)} runs hold over {arguments.steps} steps: equal to {LIMIT:g}")
    return 1 if any(bad) else 0


if __name__ == "__main__":
    sys.exit(main())
