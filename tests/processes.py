"""Several processes of one run on this machine's CPU, under the environments of different launchers."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping

from tests.compiling import child_environment

ROOT = pathlib.Path(__file__).parents[1]


class Process(subprocess.Popen):
    """`python -m <arguments>` in `folder`, with its output in `log`."""

    def __init__(
        self,
        arguments: list[str],
        environment: Mapping[str, str],
        log: pathlib.Path,
        folder: pathlib.Path = ROOT,
        prefix: tuple[str, ...] = (),
    ):
        self.log = log
        command = [*prefix, sys.executable, "-m", *arguments]
        with log.open("a") as file:
            super().__init__(
                command, env=child_environment() | environment, stdout=file, stderr=subprocess.STDOUT, cwd=folder
            )

    def output(self) -> str:
        """Return what it has printed so far."""
        return self.log.read_text() if self.log.exists() else ""


def free_port() -> int:
    """A port whose neighbour is free too: torchrun's store takes the one, JAX's coordinator the other."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("", port + 1))
                return port
            except OSError:
                continue


def environment(launcher: str, process: int, processes: int, port: int) -> dict[str, str]:
    """Return the variables that `launcher` sets for process number `process`."""
    return {
        "torchrun": {
            "RANK": process, "WORLD_SIZE": processes, "LOCAL_RANK": process, "LOCAL_WORLD_SIZE": processes,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        },
        "slurm": {
            "SLURM_PROCID": process, "SLURM_NTASKS": processes, "SLURM_LOCALID": process, "SLURM_JOB_ID": port,
            "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": processes, "JAXTRAIN_PORT": port,
        },
        "openmpi": {
            "OMPI_COMM_WORLD_RANK": process, "OMPI_COMM_WORLD_SIZE": processes, "OMPI_COMM_WORLD_LOCAL_RANK": process,
            "OMPI_COMM_WORLD_LOCAL_SIZE": processes, "JAXTRAIN_PORT": port,
        },
    }[launcher]  # fmt: skip


def start(
    processes: int,
    *arguments: str,
    launcher: str = "torchrun",
    port: int | None = None,
    module: str = "jaxtrain.run",
    folder: pathlib.Path = ROOT,
    **extra: str,
) -> list[Process]:
    """Start `python -m jaxtrain.run` (or another module) once per process, in `folder`."""
    port = port or free_port()
    running = []
    for process in range(processes):
        own = environment(launcher, process, processes, port) if processes > 1 else {}
        descriptor, log = tempfile.mkstemp(prefix="process", suffix=".log")
        os.close(descriptor)
        settings = {key: str(value) for key, value in own.items()} | extra
        running.append(Process([module, *arguments], settings, pathlib.Path(log), folder))
    return running


def finish(running: list[Process], timeout_s: float = 300) -> list[tuple[int, str]]:
    """(exit code, output) of every process."""
    deadline = time.monotonic() + timeout_s
    try:
        codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in running]
        return [(code, process.output()) for code, process in zip(codes, running, strict=True)]
    except subprocess.TimeoutExpired as error:
        raise AssertionError("\n".join(process.output() for process in running)) from error
    finally:
        end(running)


def end(running: list[Process]) -> None:
    """Kill those that live; nothing of them is left."""
    for process in running:
        if process.poll() is None:
            process.kill()
            process.wait(60)
        process.log.unlink(missing_ok=True)


def run(processes: int, *arguments: str, **options) -> list[str]:
    """Outputs of all processes of a run that ends well."""
    results = finish(start(processes, *arguments, **options))
    for code, output in results:
        assert code == 0, output
    return [output for _, output in results]


def curve(folder: pathlib.Path) -> list[tuple[int, str, float]]:
    """(step, split, loss) of every logged point."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["split"], line["values"]["loss"]) for line in lines]


def difference(first: list, second: list) -> float:
    """Largest relative difference of two curves over the same points."""
    assert [point[:2] for point in first] == [point[:2] for point in second]
    return max(abs(a[2] - b[2]) / abs(a[2]) for a, b in zip(first, second, strict=True))
