"""Exit the process at once, without Python's shutdown, and kill the processes that multiprocessing started."""

import contextlib
import os
import pathlib
import signal
import sys
import types
from collections.abc import Callable
from typing import NoReturn

HELPERS = (b"multiprocessing.forkserver", b"multiprocessing.spawn")  # in their command lines, also for forked workers


def leave(code: int) -> NoReturn:
    """Exit now with this code. Kills worker processes and their fork server: they would end by themselves, but only
    after their current task, such as importing torch."""
    for pid in _helpers():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    os._exit(code)


def leave_when_raised(goodbye: Callable[[], None]) -> None:
    """Make an exception that ends this process end it at once, after its traceback: JAX's shutdown would wait for the
    other processes, and they for this one's part of a step. goodbye: called before. A KeyboardInterrupt ends as ever.
    """
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        shown(kind, error, trace)
        if not issubclass(kind, KeyboardInterrupt):
            sys.stdout.flush()
            sys.stderr.flush()
            goodbye()
            leave(1)

    sys.excepthook = hook


def _helpers() -> list[int]:
    """List this process's descendants that multiprocessing started, children first; [] without /proc (not Linux)."""
    parents: dict[int, int] = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    mine, found = [os.getpid()], []
    for pid in mine:  # the list grows in the loop
        mine += [child for child, parent in parents.items() if parent == pid]
    for pid in mine[1:]:
        with contextlib.suppress(OSError):
            if any(name in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes() for name in HELPERS):
                found.append(pid)
    return found
