"""Processes that run a command, forked from one that has imported everything and computed nothing.

They are killed, signalled and waited for as any other; only the seconds of importing are saved, six of CPU time a
process. `PRELOAD` is imported by a fork server of their own: the product's one, for its data workers, would know
nothing of JAX where a test needed it first. With `run_interpreter` a whole interpreter runs, as a user's does.
"""

import atexit
import gc
import multiprocessing
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from unittest import mock

from tests.compiling import child_environment

PRELOAD = [
    "jaxtrain.train.trainer",
    "jaxtrain.export",
    "torch_bridge.verify",
    "jaxtrain.systems.digits.torch_twin",
    "sklearn.datasets",
    "torch._dynamo",  # torch's own, where a file is read
]
_CONTEXT = multiprocessing.get_context("forkserver")
_SERVER = forkserver.ForkServer()
_SERVER.set_forkserver_preload(PRELOAD)
_starting = threading.Lock()


def run_module(arguments: Sequence[str]) -> int:
    """`python -m <arguments>`."""
    sys.argv = list(arguments)
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    return 0


def run_interpreter(arguments: Sequence[str]) -> int:
    """The same in an interpreter of its own, which shares nothing."""
    return subprocess.call([sys.executable, "-m", *arguments])


class Forked:
    """What subprocess.Popen offers, for `work(arguments)`, whose value is the exit code, with its output in `log`."""

    def __init__(
        self,
        arguments: Sequence,
        environment: Mapping[str, str],
        log: pathlib.Path,
        work: Callable[[Sequence], int] = run_module,
    ):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX reads it as it is imported
        whole = child_environment() | dict(environment)
        self._process = _CONTEXT.Process(target=_run, args=(work, list(arguments), whole, str(log)))
        server = mock.patch.object(forkserver, "connect_to_new_process", _SERVER.connect_to_new_process)
        with _starting, server:
            self._process.start()
        self.pid = self._process.pid
        self.log = log

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

    def kill(self) -> None:
        self._process.kill()

    def output(self) -> str:
        """What it has printed so far."""
        return self.log.read_text() if self.log.exists() else ""


def _run(work: Callable[[Sequence], int], arguments: list, environment: dict[str, str], log: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the fork server ignores it
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    gc.freeze()  # what was imported need not be looked through again
    _share_compiled_programs()
    try:
        code = work(arguments)
    except SystemExit as ended:
        code = ended.code
    atexit._run_exitfuncs()  # as an interpreter does, and multiprocessing does not
    sys.stdout.flush()
    sys.exit(code)


def _share_compiled_programs() -> None:
    """All processes of a run find in the compile cache what the first one wrote, as on GPUs.

    On the CPU JAX adds to a program's key what differs between processes, and only the first writes: every other would
    compile anew in every run, for 8 s where a run takes 5 s.
    """
    import jax
    from jax._src import cache_key

    alone = cache_key._hash_accelerator_config

    def hash_devices(hashed, devices):
        if jax.process_count() == 1:
            alone(hashed, devices)

    cache_key._hash_accelerator_config = hash_devices
