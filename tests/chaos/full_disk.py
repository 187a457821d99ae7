"""A filesystem of a few MB that fills up, or takes its permission back, under a run: `python -m tests.chaos.full_disk`.

Mounts a tmpfs (as root). The run must keep training, keep its last good checkpoint, say what is wrong, and, once there
is room, save again; where there never is, it must end with exit code 1 and one clear message.
"""

import argparse
import contextlib
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence

from jaxtrain.train.checkpoint.checkpoints import Checkpoints
from tests.chaos import runs

SIZE = "4m"
LONG = (*runs.SHORT, "train.steps=300000", "evaluation.every_steps=1000000", "checkpoint.every_steps=200")
ENDING = (*runs.SHORT, "train.steps=600", "checkpoint.every_steps=50", "checkpoint.retry_s=4")


@contextlib.contextmanager
def small_disk() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory() as temporary:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", temporary], check=True)
        try:
            yield pathlib.Path(temporary)
        finally:
            subprocess.run(["umount", "-l", temporary], check=True)


def fill(disk: pathlib.Path) -> pathlib.Path:
    ballast = disk / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return ballast


def whole(folder: pathlib.Path) -> list[int]:
    """The steps of the checkpoints that are whole."""
    checkpoints = Checkpoints(folder / "checkpoints", 2, 1, "loss", "min")
    return [step for step in checkpoints.steps() if not checkpoints.problems(step)]


def fills_up_and_is_freed(disk: pathlib.Path) -> str:
    """What is wrong, or nothing."""
    folder = disk / "run"
    process = runs.start(folder, *LONG)
    log = folder.with_name("run.log")  # on the full disk too
    try:
        if not runs.wait_for(lambda: bool(list((folder / "checkpoints").glob("[0-9]*0"))), process):
            return f"no checkpoint came: {log.read_text()}"
        ballast = fill(disk)
        before = whole(folder)
        metrics = folder / "metrics.jsonl"
        if not runs.wait_for(lambda: _fails(folder), process, 60):
            return "the full disk was not noticed"
        if not set(whole(folder)) >= set(before[-1:]):
            return f"checkpoints {before} became {whole(folder)}"
        ballast.unlink()
        newest, size = max(whole(folder)), metrics.stat().st_size
        if not runs.wait_for(lambda: max(whole(folder), default=0) > newest, process, 60, every_s=0.2):
            return "it did not save again once there was room"
        if not runs.wait_for(lambda: metrics.stat().st_size > size, process, 60):
            return "it stopped training"
    finally:
        runs.kill(process)
        process.wait()
    steps = [point[0] for point in runs.points(folder)]
    gaps = [step for step in range(5, steps[-1], 5) if step not in set(steps)]
    return f"metrics.jsonl lacks steps {gaps[:5]}" if gaps else ""


def _fails(folder: pathlib.Path) -> bool:
    """Whether a save is being refused: nothing can be written of it, not even a word in the log."""
    return bool(list((folder / "checkpoints").glob("*.part"))) and not _room(folder)


def _room(folder: pathlib.Path) -> bool:
    with contextlib.suppress(OSError), (folder / "probe").open("wb", buffering=0) as file:
        return file.write(bytes(4096)) == 4096
    return False


def stays_full(disk: pathlib.Path) -> str:
    return _ends_clearly(disk, lambda: fill(disk), "No space left on device")


def loses_permission(disk: pathlib.Path) -> str:
    take = lambda: (disk / "run/checkpoints").chmod(0o555)
    return _ends_clearly(disk, take, "Permission denied", ["setpriv", "--bounding-set", "-dac_override"])


def _ends_clearly(disk: pathlib.Path, spoil: Callable, expected: str, prefix: Sequence[str] = ()) -> str:
    """prefix: a command that runs the run, so that root obeys permissions."""
    with tempfile.TemporaryDirectory() as elsewhere:
        folder = pathlib.Path(elsewhere) / "run"  # a link, so that the log lies on another disk
        (disk / "run").mkdir()
        folder.symlink_to(disk / "run")
        process = runs.start(folder, *ENDING, prefix=prefix)
        if not runs.wait_for(lambda: bool(list((folder / "checkpoints").glob("[0-9]*0"))), process):
            return f"no checkpoint came: {runs.log_of(folder).read_text()}"
        spoil()
        before = whole(folder)
        code = process.wait(300)
        said = runs.log_of(folder).read_text()
        if code != 1 or expected not in said or "The last good one is step" not in said or "Traceback" in said:
            return f"exit code {code}: {said[-3000:]}"
        newest = lambda steps: max(map(int, steps), default=0)  # an older one may go once a newer one stands
        return "" if newest(whole(folder)) >= newest(before) else f"checkpoints {before} became {whole(folder)}"


def main(argv: list[str] | None = None) -> int:
    cases = {case.__name__: case for case in (fills_up_and_is_freed, stays_full, loses_permission)}
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--cases", nargs="+", choices=cases, default=list(cases))
    arguments = p.parse_args(argv)
    good = 0
    for case in [cases[name] for name in arguments.cases]:
        with small_disk() as disk:
            wrong = case(disk)
        good += not wrong
        print(f"{case.__name__}: {wrong or 'no checkpoint lost, clear message'}", flush=True)
    print(f"{good} of {len(arguments.cases)} cases")
    return 0 if good == len(arguments.cases) else 1


if __name__ == "__main__":
    sys.exit(main())
