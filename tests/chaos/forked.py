"""Processes that run `jaxtrain.run`, forked from one that has imported everything and computed nothing.

They are killed, signalled and waited for as any other; only the seconds of importing are saved, so that a hundred kills
take minutes. `PRELOAD` is imported by multiprocessing's fork server.
"""

import atexit
import multiprocessing
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

PRELOAD = ["jaxtrain.train.trainer", "jaxtrain.export", "torch_bridge.verify", "jaxtrain.systems.digits.torch_twin"]
_CONTEXT = multiprocessing.get_context("forkserver")


def run_command(arguments: Sequence[str]) -> int:
    """`python -m jaxtrain.run <arguments>`."""
    from jaxtrain import run

    sys.argv = ["jaxtrain.run", *arguments]
    return run.main(arguments)


class Forked:
    """What subprocess.Popen offers, for `work(arguments)`, whose value is the exit code, with its output in `log`."""

    def __init__(
        self,
        arguments: Sequence,
        environment: Mapping[str, str],
        log: pathlib.Path,
        work: Callable[[Sequence], int] = run_command,
    ):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX reads it as it is imported
        _CONTEXT.set_forkserver_preload(PRELOAD)
        self._process = _CONTEXT.Process(target=_run, args=(work, list(arguments), dict(environment), str(log)))
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("jaxtrain.run", timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _run(work: Callable[[Sequence], int], arguments: list, environment: dict[str, str], log: str) -> None:
    os.environ.update(environment)
    os.environ.pop("XLA_FLAGS", None)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = work(arguments)
    atexit._run_exitfuncs()  # as an interpreter does, and multiprocessing does not
    sys.stdout.flush()
    sys.exit(code)
