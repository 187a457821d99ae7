"""Random damage to the newest checkpoint: `python -m tests.chaos.damages --damages 50`.

A truncated file, a flipped byte, a missing file, a half-written folder; and whole files where they do not belong:
another step's folder, two files exchanged, a link, a pipe, another run's seal. `jaxtrain.checkpoints verify` must find
it; the run must say so in one line, go on from the older checkpoint, and end with the bits of the run that nobody
damaged.
"""

import contextlib
import io
import logging
import os
import pathlib
import random
import shutil
import sys
import tempfile
from collections.abc import Callable

from jaxtrain import checkpoints as command
from jaxtrain import config_io
from jaxtrain.train.checkpoint import manifest
from jaxtrain.train.trainer import Trainer
from tests.chaos import runs

STEPS = ("train.steps=20", "checkpoint.every_steps=5", "evaluation.every_steps=10", "run.quiet=true", "shard.devices=1")


def truncate(folder: pathlib.Path, chance: random.Random) -> str:
    path = _any_file(folder, chance)
    size = chance.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.truncate(size)
    return f"{path.name} cut to {size} bytes"


def flip(folder: pathlib.Path, chance: random.Random) -> str:
    path = _any_file(folder, chance)
    content = bytearray(path.read_bytes())
    place = chance.randrange(len(content))
    content[place] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    return f"a bit of byte {place} of {path.name} flipped"


def remove(folder: pathlib.Path, chance: random.Random) -> str:
    path = _any_file(folder, chance)
    path.unlink()
    return f"{path.name} removed"


def half_write(folder: pathlib.Path, chance: random.Random) -> str:
    """As a copy that was cut off leaves it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    gone = chance.sample(paths, chance.randint(1, len(paths)))
    for path in gone:
        path.unlink()
    return f"{len(gone)} of {len(paths)} files missing"


def older(folder: pathlib.Path, chance: random.Random) -> str:
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("15"), folder)
    return "the folder of step 15 under its name"


def exchange(folder: pathlib.Path, chance: random.Random) -> str:
    first, second = chance.sample(sorted(path for path in folder.rglob("*") if path.is_file()), 2)
    aside = first.rename(folder / "aside")
    second.rename(first)
    aside.rename(second)
    return f"{first.name} and {second.name} exchanged"


def append(folder: pathlib.Path, chance: random.Random) -> str:
    path = _any_file(folder, chance)
    with path.open("ab") as file:
        file.write(chance.randbytes(chance.randint(1, 100)))
    return f"{path.name} grown"


def empty(folder: pathlib.Path, chance: random.Random) -> str:
    """As a machine that lost its power leaves them."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    return "all files empty"


def link(folder: pathlib.Path, chance: random.Random) -> str:
    path = _any_file(folder, chance)
    outside = path.rename(folder.parents[1] / "moved")
    path.symlink_to(outside)
    return f"{path.name} a link out of the checkpoint"


def pipe(folder: pathlib.Path, chance: random.Random) -> str:
    path = chance.choice(sorted(path for path in (folder / "state").rglob("*") if path.is_file()))
    path.unlink()
    os.mkfifo(path)
    return f"{path.name} a pipe"


def directory(folder: pathlib.Path, chance: random.Random) -> str:
    path = _any_file(folder, chance)
    path.unlink()
    path.mkdir()
    return f"{path.name} a folder"


def another_run(folder: pathlib.Path, chance: random.Random) -> str:
    manifest.renew(folder, {**manifest.read(folder), "run": "0" * 32})
    return "another run's, sealed as such"


DAMAGES: tuple[Callable[[pathlib.Path, random.Random], str], ...] = (truncate, flip, remove, half_write)
SWAPS: tuple[Callable[[pathlib.Path, random.Random], str], ...] = (
    older, exchange, append, empty, link, pipe, directory, another_run,
)  # fmt: skip


def _any_file(folder: pathlib.Path, chance: random.Random) -> pathlib.Path:
    return chance.choice(sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size))


def go_on(folder: pathlib.Path) -> str:
    """Start the run again, in this process; what it said in train.log since then."""
    log = folder / "train.log"
    before = log.stat().st_size if log.exists() else 0
    overrides = (*runs.SHORT, *STEPS, f"run.dir={folder}")
    task, config = config_io.load(runs.CONFIG, overrides)
    Trainer(config=config, task=task).train()
    logging.getLogger("jaxtrain").handlers.clear()
    return log.read_text()[before:]


def recovers(whole: pathlib.Path, folder: pathlib.Path, damage: Callable, chance: random.Random) -> tuple[str, str]:
    """What was damaged, and what is wrong with the recovery, or nothing."""
    shutil.copytree(whole, folder)
    what = damage(folder / "checkpoints/20", chance)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = command.main(["verify", "--run", str(folder)])
    if code != 1 or out.getvalue().count("DAMAGED") != 1:
        return what, f"verify does not find it: {out.getvalue()}"
    said = go_on(folder)
    if said.count("CHECKPOINT 20 IS DAMAGED") != 1 or "resumed from" not in said or "at step 15 of 20" not in said:
        return what, f"it says {said}"
    if not runs.same_state(runs.final_state(whole), runs.final_state(folder)):
        return what, "it ends with other bits"
    return what, "" if runs.points(whole) == runs.points(folder) else "it ends with other points"


def main(argv: list[str] | None = None) -> int:
    p = runs.attempts(__doc__, "damages", 50)
    arguments = p.parse_args(argv)
    chance = random.Random(arguments.seed)
    good = 0
    with tempfile.TemporaryDirectory() as temporary:
        whole = pathlib.Path(temporary) / "whole"
        go_on(whole)
        for i in range(arguments.damages):
            damage = (*DAMAGES, *SWAPS)[i % len(DAMAGES + SWAPS)]
            folder = pathlib.Path(temporary) / str(i)
            with contextlib.redirect_stdout(io.StringIO()):
                what, wrong = recovers(whole, folder, damage, chance)
            good += not wrong
            print(f"{what}: {wrong or 'detected, recovered from step 15'}", flush=True)
            shutil.rmtree(folder)
    print(f"{good} of {arguments.damages} damages detected and recovered from")
    return 0 if good == arguments.damages else 1


if __name__ == "__main__":
    sys.exit(main())
