"""Several processes of one run, forked from one that has imported everything, as torchrun would start them."""

import pathlib
import subprocess

from tests import processes
from tests.chaos.forked import Forked
from tests.chaos.runs import log_of

LIMIT_S = 900


class RunFailedError(RuntimeError):
    """A process ended with another exit code than 0."""


def run(count: int, config: pathlib.Path, folder: pathlib.Path, *overrides: str) -> None:
    """Train `config` in `folder` with so many processes; raises RunFailedError with what the first bad one printed."""
    port = processes.free_port()
    running = []
    for process in range(count):
        own = processes.environment("torchrun", process, count, port) if count > 1 else {}
        environment = {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"} | {key: str(value) for key, value in own.items()}
        arguments = ["--config", str(config), f"run.dir={folder}", "tracking.tensorboard=false", *overrides]
        running.append(Forked(arguments, environment, _log(folder, process)))
    try:
        codes = [one.wait(LIMIT_S) for one in running]
    except subprocess.TimeoutExpired:
        codes = [one.poll() for one in running]
    finally:
        for one in running:
            if one.poll() is None:
                one.send_signal(9)
    bad = [process for process, code in enumerate(codes) if code != 0]
    if bad:
        raise RunFailedError(f"exit codes {codes}: {_log(folder, bad[0]).read_text()[-2000:]}")


def _log(folder: pathlib.Path, process: int) -> pathlib.Path:
    return log_of(folder.with_name(f"{folder.name}-{process}"))
