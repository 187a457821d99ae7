"""Several processes that train one run after another together."""

import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence

from tests import processes

LIMIT_S = 1800
Job = tuple[pathlib.Path, tuple[str, ...]]  # a config file, and settings with run.dir among them


class RunFailedError(RuntimeError):
    """A process ended with another exit code than 0."""


def train(count: int, jobs: Sequence[Job], place: pathlib.Path, last_bit: bool = False) -> None:
    """Train every job in `count` processes, connected as torchrun's are; logs go to `place`.

    A job restores what its folder holds into a trainer of its own, so nothing passes from one to the next but compiled
    programs. last_bit: change the last bit of all initial weights. Raises RunFailedError with what the first bad
    process printed.
    """
    port = processes.free_port()
    told = json.dumps([(str(config), settings) for config, settings in jobs])
    running = []
    for process in range(count):
        own = processes.environment("torchrun", process, count, port) if count > 1 else {}
        environment = {"OMP_NUM_THREADS": "1"} | {key: str(value) for key, value in own.items()}
        arguments = ["tests.chaos.together", told, *(["last_bit"] if last_bit else [])]
        running.append(processes.Process(arguments, environment, place / f"together-{count}-{process}.log"))
    codes: list[int | None] = []
    try:
        codes = [one.wait(LIMIT_S) for one in running]
    except subprocess.TimeoutExpired:
        codes = [one.poll() for one in running]
    finally:
        for one in running:
            one.kill()
            one.wait()
    bad = [process for process, code in enumerate(codes) if code != 0]
    if bad:
        raise RunFailedError(f"exit codes {codes}: {running[bad[0]].output()[-3000:]}")


def train_jobs(jobs: Sequence[Job], last_bit: bool) -> None:
    from jaxtrain import config_io
    from jaxtrain.runtime import launch
    from jaxtrain.train.trainer import Trainer

    launch.setup_distributed()
    for config, settings in jobs:
        task, loaded = config_io.load(config, ("tracking.tensorboard=false", *settings))
        trainer = Trainer(config=loaded, task=task)
        if last_bit:
            _change_the_last_bit(trainer)
        trainer.train()
    launch.wait_for_all("end of the jobs")


def _change_the_last_bit(trainer) -> None:
    import dataclasses

    import jax
    import numpy as np

    changed = lambda leaf: jax.device_put(np.nextafter(np.asarray(leaf), np.float32(np.inf)), leaf.sharding)
    trainer.state = dataclasses.replace(trainer.state, params=jax.tree.map(changed, trainer.state.params))


if __name__ == "__main__":
    train_jobs(json.loads(sys.argv[1]), last_bit="last_bit" in sys.argv[2:])
