"""A lost process or machine under torchrun: the run goes on from its last checkpoint with those that are left."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests import processes
from tests.chaos import runs
from tests.compiling import child_environment

TRAINING = (
    "-m",
    "jaxtrain.run",
    "--config",
    str(runs.CONFIG),
    "tracking.tensorboard=false",
    "data.source=numpy",
    "train.steps=200",
    "train.log_every_steps=5",
    "evaluation.every_steps=50",
    "checkpoint.every_steps=5",
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The curve of the run on one process."""
    folder = tmp_path_factory.mktemp("elastic") / "run"
    assert subprocess.run([sys.executable, *TRAINING, f"run.dir={folder}"], env=environment()).returncode == 0
    return processes.curve(folder)


def environment():
    return child_environment() | {"OMP_NUM_THREADS": "1", "JAXTRAIN_START_TIMEOUT_S": "300"}


def torchrun(folder: pathlib.Path, log: pathlib.Path, *options: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch_bridge.torchrun", *options, "--max-restarts=3"]
    with log.open("a") as file:
        return subprocess.Popen(
            [*command, *TRAINING, f"run.dir={folder}"], env=environment(), stdout=file, stderr=subprocess.STDOUT
        )


def workers(agent: subprocess.Popen) -> list[psutil.Process]:
    return [child for child in psutil.Process(agent.pid).children() if "jaxtrain.run" in child.cmdline()]


def end(agent: subprocess.Popen) -> None:
    """Kill an agent and its processes: the machine is gone."""
    if agent.poll() is None:
        for child in [*psutil.Process(agent.pid).children(recursive=True), psutil.Process(agent.pid)]:
            child.kill()
        agent.wait(60)


def wait_for_checkpoint(folder: pathlib.Path, agent: subprocess.Popen, log: pathlib.Path) -> None:
    deadline = time.monotonic() + 300
    while not any(path.name.isdigit() for path in (folder / "checkpoints").glob("*")):
        assert agent.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)


@pytest.mark.slow
def test_a_lost_process_brings_all_back_at_the_last_checkpoint(undisturbed, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    agent = torchrun(folder, log, "--standalone", "--nproc_per_node=2")
    try:
        wait_for_checkpoint(folder, agent, log)
        os.kill(workers(agent)[1].pid, signal.SIGKILL)
        assert agent.wait(500) == 0, log.read_text()
    finally:
        end(agent)
    said = log.read_text()
    assert said.count("resumed from") == 1
    assert said.rpartition("resumed from")[2].count("on 2 x cpu") == 1
    assert processes.difference(undisturbed, processes.curve(folder)) < 1e-5


@pytest.mark.slow
def test_a_lost_machine_leaves_the_others_to_go_on_in_the_same_order(undisturbed, tmp_path):
    folder, logs = tmp_path / "run", [tmp_path / "0", tmp_path / "1"]
    meeting = f"--rdzv-endpoint=127.0.0.1:{processes.free_port()}"
    options = ("--nnodes=1:2", "--nproc_per_node=1", "--rdzv-backend=c10d", meeting, "--rdzv-id=elastic")
    options += ("--rdzv-conf=last_call_timeout=15", "--local-addr=127.0.0.1")
    agents = [torchrun(folder, logs[0], *options)]
    try:
        time.sleep(3)  # the first one keeps the store
        agents.append(torchrun(folder, logs[1], *options))
        wait_for_checkpoint(folder, agents[0], logs[0])
        assert "on 2 x cpu" in logs[0].read_text() + logs[1].read_text()
        end(agents[1])
        assert agents[0].wait(500) == 0, logs[0].read_text()
    finally:
        for agent in agents:
            end(agent)
    said = logs[0].read_text().rpartition("resumed from")[2]
    assert "on 1 x cpu" in said, logs[0].read_text()
    assert processes.difference(undisturbed, processes.curve(folder)) < 1e-5
