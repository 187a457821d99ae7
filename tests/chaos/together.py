"""Several processes that train one run after another together, forked from one that has imported everything."""

import pathlib
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from tests import processes
from tests.forked import Forked

LIMIT_S = 1800
Job = tuple[pathlib.Path, tuple[str, ...]]  # a config file, and settings with run.dir among them


class RunFailedError(RuntimeError):
    """A process ended with another exit code than 0."""


def train(count: int, jobs: Sequence[Job], place: pathlib.Path, work: Callable[[Sequence[Job]], int] | None = None):
    """So many processes, connected as torchrun's are, train every job; logs go to `place`. work: what trains them.

    A job restores what its folder holds into a trainer of its own, so nothing passes from one to the next but compiled
    programs. Raises RunFailedError with what the first bad process printed.
    """
    port = processes.free_port()
    running, logs = [], []
    for process in range(count):
        own = processes.environment("torchrun", process, count, port) if count > 1 else {}
        environment = {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"} | {key: str(value) for key, value in own.items()}
        logs.append(place / f"together-{count}-{process}.log")
        running.append(Forked(jobs, environment, logs[-1], work=work or train_jobs))
    codes: list[int | None] = []
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
        raise RunFailedError(f"exit codes {codes}: {logs[bad[0]].read_text()[-3000:]}")


def train_jobs(jobs: Sequence[Job], prepare: Callable[[Any], None] = lambda trainer: None) -> int:
    from jaxtrain import config_io
    from jaxtrain.runtime import launch
    from jaxtrain.train.trainer import Trainer

    launch.setup_distributed()
    for config, settings in jobs:
        task, loaded = config_io.load(config, ("tracking.tensorboard=false", *settings))
        trainer = Trainer(config=loaded, task=task)
        prepare(trainer)
        trainer.train()
    launch.wait_for_all("end of the jobs")
    return 0
