"""Every task with several processes against one: `python -m tests.chaos.tasks_in_processes [--tasks ...]`.

The loss curve over 50 steps to 1e-5 relative, and the metrics of every evaluation to as much. Plain SGD at 0.01: Adam
divides by the root of a moment that may be rounding only, and so turns a difference of 1e-7 into one of the learning
rate. Where a task couples the samples of a batch, its batch is the same on any number of processes too.
"""

import argparse
import itertools
import json
import pathlib
import sys
import tempfile

from tests.chaos import together

STRATEGIES = ("ddp", "fsdp")
LIMIT = 1e-5


def settings(steps: int) -> tuple[str, ...]:
    from tests.contract.tasks import PLAIN

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
    from tests.contract.tasks import TASKS, tiny_file  # processes import this module, and must find JAX untouched

    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, metavar="TASK")
    p.add_argument("--steps", type=int, default=50)
    p.add_argument("--processes", nargs="+", type=int, default=[2, 4])
    arguments = p.parse_args(argv)
    good = total = 0
    with tempfile.TemporaryDirectory() as temporary:
        place = pathlib.Path(temporary)

        def jobs(count: int, *strategies: str) -> list[together.Job]:
            own = lambda task, strategy: (
                f"run.dir={place / f'{task}-{count}-{strategy}'}",
                f"shard.strategy={strategy}",
            )
            return [
                (tiny_file(task), (*settings(arguments.steps), *own(task, strategy)))
                for task in arguments.tasks
                for strategy in strategies
            ]

        together.train(1, jobs(1, "ddp"), place)
        for count in arguments.processes:
            together.train(count, jobs(count, *STRATEGIES), place)
            for task, strategy in itertools.product(arguments.tasks, STRATEGIES):
                ours, theirs = values(place / f"{task}-1-ddp"), values(place / f"{task}-{count}-{strategy}")
                curve, metrics = (largest_difference(ours, theirs, split) for split in ("train", "validation"))
                holds = max(curve, metrics) <= LIMIT
                good, total = good + holds, total + 1
                said = "" if holds else "  DIFFERS"
                print(f"{task} {count} x {strategy}: loss {curve:.1e}, evaluation {metrics:.1e}{said}", flush=True)
    print(f"{good} of {total} runs equal one process to {LIMIT:g} over {arguments.steps} steps")
    return 0 if good == total else 1


if __name__ == "__main__":
    sys.exit(main())
