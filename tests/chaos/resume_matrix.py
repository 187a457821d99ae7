"""Checkpoints of any strategy and process count go on under any other: `python -m tests.chaos.resume_matrix`.

{ddp, fsdp} x {1, 2, 4 processes} -> the same six: each of the 36 cells must continue the uninterrupted curve to 1e-5.
"""

import argparse
import itertools
import pathlib
import shutil
import sys
import tempfile

from tests.chaos import together
from tests.chaos.runs import CONFIG
from tests.processes import curve, difference

LIMIT = 1e-5
STRATEGIES, COUNTS = ("ddp", "fsdp"), (1, 2, 4)
QUICK = ("data.source=numpy", "train.log_every_steps=1", "evaluation.every_epochs=null", "optim.schedule.name=constant")
HALF, WHOLE = ("train.steps=15",), ("train.steps=30",)


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(argv)
    good, worst = 0, 0.0
    with tempfile.TemporaryDirectory() as temporary:
        place = pathlib.Path(temporary)
        job = lambda folder, strategy, *steps: (
            CONFIG,
            (f"run.dir={folder}", f"shard.strategy={strategy}", *QUICK, *steps),
        )
        for count in COUNTS:
            jobs = [job(place / f"{strategy}{count}", strategy, *HALF) for strategy in STRATEGIES]
            together.train(count, [*jobs, job(place / "whole", "ddp", *WHOLE)] if count == 1 else jobs, place)
        whole = curve(place / "whole")
        for many in COUNTS:
            cells = list(itertools.product(STRATEGIES, COUNTS, STRATEGIES))
            for first, few, then in cells:
                shutil.copytree(place / f"{first}{few}", place / f"{first}{few}-{then}{many}")
            together.train(many, [job(place / f"{a}{n}-{b}{many}", b, *WHOLE) for a, n, b in cells], place)
            for first, few, then in cells:
                found = difference(whole, curve(place / f"{first}{few}-{then}{many}"))
                worst, good = max(worst, found), good + (found <= LIMIT)
                print(f"{first} on {few} -> {then} on {many}: {found:.1e}", flush=True)
    total = (len(STRATEGIES) * len(COUNTS)) ** 2
    print(f"{good} of {total} cells continue the curve to {LIMIT:g}; the largest difference is {worst:.1e}")
    return 0 if good == total else 1


if __name__ == "__main__":
    sys.exit(main())
