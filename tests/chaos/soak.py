"""A small task with workers, many evaluations and checkpoints: `python -m tests.chaos.soak --steps 3000`.

Prints memory (of the run and its workers, without the files that they map, which other processes of the machine share),
open files and threads over time, and the slopes of their floors over the second half of the run: of the lowest value in
each half minute, as a checkpoint being written comes and goes, and a leak lifts the floor. --minutes: how long the
steps are to take together, at least.
"""

import argparse
import pathlib
import sys
import tempfile
import time

import numpy as np
import psutil

from tests.chaos import runs

SETTINGS = (
    "task=tests.chaos.slow_digits.classify",
    "data.source=numpy",
    "data.placement=host",
    "data.num_workers=2",
    "train.log_every_steps=10",
    "evaluation.every_epochs=null",
    "run.quiet=true",
)
EVALUATIONS, SAVES = 15, 6  # steps from one to the next: 3,000 steps have 200 and 500
MEMORY_MB_PER_HOUR = 5.0
FLOOR_S = 30.0
FILES_PER_HOUR = THREADS_PER_HOUR = 2.0


def sample(process: psutil.Process) -> tuple[float, int, int]:
    """MB, open files and threads of a process and its children."""
    memory = files = threads = 0
    for one in (process, *process.children(recursive=True)):
        try:
            memory, files, threads = memory + own_kb(one), files + one.num_fds(), threads + one.num_threads()
        except psutil.NoSuchProcess:
            continue
    return memory / 1e3, files, threads


def own_kb(process: psutil.Process) -> int:
    """Memory that is no file's: what the process allocated, and its shared segments."""
    try:
        lines = pathlib.Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def newest(folder: pathlib.Path) -> int:
    """Return the step of the newest checkpoint; 0 where there is none."""
    return max((int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdigit()), default=0)


def watch(process: runs.Process, folder: pathlib.Path, steps: int, every_s: float) -> np.ndarray:
    """float [sample, 5]: seconds, step, MB, open files, threads; from the first checkpoint to the last."""
    began, rows = time.monotonic(), []
    while process.poll() is None and (step := newest(folder)) < steps:
        try:
            rows.append((time.monotonic() - began, step, *sample(psutil.Process(process.pid))))
        except psutil.Error:
            break
        if len(rows) % 20 == 0:
            print("{:6.0f} s  step {:.0f}  {:8.1f} MB  {:.0f} open files  {:.0f} threads".format(*rows[-1]), flush=True)
        time.sleep(every_s)
    return np.array(rows)


def slopes(rows: np.ndarray, column: int) -> list[float]:
    """Per unit of a column, over the second half of the steps: least squares, through the floors of each value."""
    late = rows[rows[:, 1] >= rows[-1, 1] / 2]
    windows = np.array_split(late, max(2, round((late[-1, 0] - late[0, 0]) / FLOOR_S)))
    middles = [window[:, column].mean() for window in windows]
    return [float(np.polyfit(middles, [window[:, value].min() for window in windows], 1)[0]) for value in (2, 3, 4)]


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--steps", type=int, default=3000)
    p.add_argument("--minutes", type=float, default=30.0)  # in fewer, what is in flight hides the slope
    p.add_argument("--evaluations", type=int, default=EVALUATIONS, help="steps from one to the next")
    p.add_argument("--saves", type=int, default=SAVES, help="steps from one to the next")
    arguments = p.parse_args(argv)
    often = (f"evaluation.every_steps={arguments.evaluations}", f"checkpoint.every_steps={arguments.saves}")
    slow_s = arguments.minutes * 60 / (arguments.steps / arguments.evaluations) / 359  # for each validation sample
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary) / "soak"
        settings = (*SETTINGS, *often, f"train.steps={arguments.steps}")
        process = runs.start(folder, *settings, CHAOS_SLOW_S=str(slow_s))
        try:
            if not runs.wait_for(lambda: newest(folder) > 0, process):
                print(runs.log_of(folder).read_text())
                return 1
            rows = watch(process, folder, arguments.steps, 1.0)
            ended = process.wait(300)
        finally:
            runs.kill(process)
            process.wait()
        print(runs.log_of(folder).read_text()[-2000:] if ended else "", end="")
    memory, files, threads = slopes(rows, 0)
    steps = int(rows[-1, 1])
    print(
        f"{steps} steps, {steps // arguments.evaluations} evaluations, {steps // arguments.saves} checkpoints in "
        f"{rows[-1, 0] / 60:.1f} "
        f"minutes; slopes per hour: memory {memory * 3600:+.1f} MB of {rows[-1, 2]:.0f} "
        f"({slopes(rows, 1)[0] * 1000:+.2f} MB per 1,000 steps), open files {files * 3600:+.2f} of {rows[-1, 3]:.0f}, "
        f"threads {threads * 3600:+.2f} of {rows[-1, 4]:.0f}"
    )
    flat = memory * 3600 < MEMORY_MB_PER_HOUR and files * 3600 < FILES_PER_HOUR and threads * 3600 < THREADS_PER_HOUR
    return 0 if ended == 0 and flat else 1


if __name__ == "__main__":
    sys.exit(main())
