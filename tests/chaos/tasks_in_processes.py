"""Every task with several processes against one: `python -m tests.chaos.tasks_in_processes [--tasks ...]`.

The loss curve over 50 steps to 1e-5 relative, and the metrics of every evaluation to as much. Plain SGD at 0.01: Adam
divides by the root of a moment that may be rounding only, and so turns a difference of 1e-7 into one of the learning
rate. Where a task couples the samples of a batch, its batch is the same on any number of processes too.
"""

import argparse
import json
import pathlib
import shutil
import sys
import tempfile

from tests.chaos import together
from tests.contract.tasks import PLAIN, TASKS, tiny_file

RUNS = [(2, "ddp"), (2, "fsdp"), (4, "ddp"), (4, "fsdp")]
LIMIT = 1e-5


def settings(steps: int) -> tuple[str, ...]:
    every = ("train.log_every_steps=1", "evaluation.every_epochs=null", f"evaluation.every_steps={steps // 2}")
    return (f"train.steps={steps}", "data.batch_size=8", "data.eval_batch_size=8", *every, *PLAIN)


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


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, metavar="TASK")
    p.add_argument("--steps", type=int, default=50)
    p.add_argument("--runs", nargs="+", default=[f"{count}x{strategy}" for count, strategy in RUNS], metavar="2xddp")
    arguments = p.parse_args(argv)
    good = total = 0
    for task in arguments.tasks:
        with tempfile.TemporaryDirectory() as temporary:
            whole = pathlib.Path(temporary) / "1"
            together.run(1, tiny_file(task), whole, *settings(arguments.steps))
            for run in arguments.runs:
                count, strategy = run.split("x")
                folder = pathlib.Path(temporary) / run
                try:
                    overrides = (*settings(arguments.steps), f"shard.strategy={strategy}")
                    together.run(int(count), tiny_file(task), folder, *overrides)
                    ours, theirs = values(whole), values(folder)
                    curve, metrics = (largest_difference(ours, theirs, split) for split in ("train", "validation"))
                    holds = max(curve, metrics) <= LIMIT
                    said = f"loss curve {curve:.1e}, evaluation {metrics:.1e}{'' if holds else '  DIFFERS'}"
                except (together.RunFailedError, AssertionError) as error:
                    holds, said = False, f"FAILED: {error}"
                good, total = good + holds, total + 1
                print(f"{task} {run}: {said}", flush=True)
                shutil.rmtree(folder, ignore_errors=True)
    print(f"{good} of {total} runs equal one process to {LIMIT:g} over {arguments.steps} steps")
    return 0 if good == total else 1


if __name__ == "__main__":
    sys.exit(main())
