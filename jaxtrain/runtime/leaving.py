"""Leave the process at once, without what Python does at its end, and take along what multiprocessing started."""

import contextlib
import os
import pathlib
import signal
from typing import NoReturn

HELPERS = (b"multiprocessing.forkserver", b"multiprocessing.spawn")  # in the command line, that of forked workers too


def leave(code: int) -> NoReturn:
    """End with this exit code now. Worker processes and their fork server would end by themselves, but only after what
    they are in the middle of, as importing torch."""
    for pid in _helpers():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    os._exit(code)


def _helpers() -> list[int]:
    """This process's descendants that multiprocessing started, children first. Empty without /proc (not Linux)."""
    parents: dict[int, int] = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    mine, found = [os.getpid()], []
    for pid in mine:  # grows
        mine += [child for child, parent in parents.items() if parent == pid]
    for pid in mine[1:]:
        with contextlib.suppress(OSError):
            if any(name in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes() for name in HELPERS):
                found.append(pid)
    return found
