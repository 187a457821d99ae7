"""Processes that run `jaxtrain.run`, forked from one that has imported everything and computed nothing.

They are killed, signalled and waited for as any other; only the seconds of importing are saved, so that a hundred kills
take minutes. `PRELOAD` is imported by multiprocessing's fork server.
"""

import multiprocessing
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence

PRELOAD = ["jaxtrain.train.trainer", "jaxtrain.export", "torch_bridge.verify", "jaxtrain.systems.digits.torch_twin"]
_CONTEXT = multiprocessing.get_context("forkserver")


class Forked:
    """What subprocess.Popen offers, for `python -m jaxtrain.run <arguments>` with its output appended to `log`."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: pathlib.Path):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX reads it as it is imported
        _CONTEXT.set_forkserver_preload(PRELOAD)
        self._process = _CONTEXT.Process(target=_run, args=(list(arguments), dict(environment), str(log)))
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


def _run(arguments: list[str], environment: dict[str, str], log: str) -> None:
    import atexit

    from jaxtrain import run

    os.environ.update(environment)
    os.environ.pop("XLA_FLAGS", None)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = ["jaxtrain.run", *arguments]
    code = run.main(arguments)
    atexit._run_exitfuncs()  # as an interpreter does, and multiprocessing does not
    sys.stdout.flush()
    sys.exit(code)
