"""A small task for half an hour, with many evaluations and checkpoints: `python -m tests.chaos.soak --minutes 30`.

Prints resident memory, open files and threads over time, and their slopes over the second half of the run.
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
    "train.steps=5000000",
    "train.log_every_steps=100",
    "evaluation.every_steps=100",
    "checkpoint.every_steps=50",
    "run.quiet=true",
)
MEMORY_MB_PER_HOUR = 40.0  # histories and metrics grow by their points
FILES_PER_HOUR = THREADS_PER_HOUR = 2.0


def watch(process: psutil.Process, minutes: float, every_s: float) -> np.ndarray:
    """float [sample, 4]: seconds, resident MB, open files, threads."""
    began, rows = time.monotonic(), []
    while (elapsed := time.monotonic() - began) < minutes * 60:
        time.sleep(every_s)
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            break
        rows.append((elapsed, process.memory_info().rss / 1e6, process.num_fds(), process.num_threads()))
        if len(rows) % 20 == 0:
            print("{:6.0f} s  {:8.1f} MB  {:.0f} open files  {:.0f} threads".format(*rows[-1]), flush=True)
    return np.array(rows)


def slopes(rows: np.ndarray) -> list[float]:
    """Per hour, over the second half: least squares."""
    late = rows[len(rows) // 2 :]
    return [float(np.polyfit(late[:, 0] / 3600, late[:, column], 1)[0]) for column in (1, 2, 3)]


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--minutes", type=float, default=30.0)
    arguments = p.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary) / "soak"
        process = runs.start(folder, *SETTINGS, CHAOS_SLOW_S="0.001")
        try:
            if not runs.wait_for(lambda: any((folder / "checkpoints").glob("[0-9]*")), process):
                print(runs.log_of(folder).read_text())
                return 1
            rows = watch(psutil.Process(process.pid), arguments.minutes, max(1.0, arguments.minutes * 60 / 400))
            alive = process.poll() is None
            step = max(int(path.name) for path in (folder / "checkpoints").glob("[0-9]*") if path.name.isdigit())
        finally:
            runs.kill(process)
            process.wait()
    memory, files, threads = slopes(rows)
    print(
        f"{rows[-1, 0] / 60:.1f} minutes, {step} steps, {step // 100} evaluations, {step // 50} checkpoints; slopes "
        f"per hour: memory {memory:+.1f} MB of {rows[-1, 1]:.0f}, open files {files:+.2f} of {rows[-1, 2]:.0f}, "
        f"threads {threads:+.2f} of {rows[-1, 3]:.0f}"
    )
    flat = memory < MEMORY_MB_PER_HOUR and files < FILES_PER_HOUR and threads < THREADS_PER_HOUR
    return 0 if alive and flat else 1


if __name__ == "__main__":
    sys.exit(main())
