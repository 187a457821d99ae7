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
SHAPES = list(itertools.product(("ddp", "fsdp"), (1, 2, 4)))
QUICK = ("data.source=numpy", "train.log_every_steps=1", "evaluation.every_epochs=null", "optim.schedule.name=constant")
HALF, WHOLE = ("train.steps=15",), ("train.steps=30",)


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(argv)
    good, worst = 0, 0.0
    with tempfile.TemporaryDirectory() as temporary:
        place = pathlib.Path(temporary)
        together.run(1, CONFIG, place / "whole", *QUICK, *WHOLE)
        whole = curve(place / "whole")
        for strategy, count in SHAPES:
            together.run(count, CONFIG, place / f"{strategy}{count}", *QUICK, *HALF, f"shard.strategy={strategy}")
        for (first, few), (then, many) in itertools.product(SHAPES, SHAPES):
            folder = place / "cell"
            shutil.copytree(place / f"{first}{few}", folder)
            together.run(many, CONFIG, folder, *QUICK, *WHOLE, f"shard.strategy={then}")
            found = difference(whole, curve(folder))
            worst, good = max(worst, found), good + (found <= LIMIT)
            print(f"{first} on {few} -> {then} on {many}: {found:.1e}", flush=True)
            shutil.rmtree(folder)
    print(f"{good} of {len(SHAPES) ** 2} cells continue the curve to {LIMIT:g}; the largest difference is {worst:.1e}")
    return 0 if good == len(SHAPES) ** 2 else 1


if __name__ == "__main__":
    sys.exit(main())
