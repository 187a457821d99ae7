"""Loops around compiled steps of DistributedDataParallel modules, in two processes, give torch's numbers."""

import json
from collections.abc import Iterable

import pytest

from tests import processes
from tests.e2e.ddp_loops import LOOPS

pytestmark = pytest.mark.slow

COMMON = (
    "plain",
    "accumulation_with_no_sync",
    "a_loss_that_torch_runs_in_one_process",
    "two_wrappers_of_a_gan",
)
OTHERS = sorted(LOOPS.keys() - set(COMMON))


def told(loops: Iterable[str]) -> list[dict]:
    """Return by name what each of two processes says of these loops."""
    running = processes.start(2, *loops, module="tests.e2e.ddp_loops")
    lists = []
    for code, output in processes.finish(running, timeout_s=900):
        assert code == 0, output
        lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        lists.append({line["loop"]: line["found"] for line in lines})
    return lists


@pytest.fixture(scope="module")
def common():
    return told(COMMON)


@pytest.fixture(scope="module")
def others():
    return told(OTHERS)


@pytest.mark.parametrize("loop", COMMON)
def test_a_loop_gives_torchs_losses_weights_and_buffers_in_each_process(common, loop):
    for process in common:
        assert process[loop]["loss"] < 1e-6
        assert process[loop]["state"] < 1e-6


@pytest.mark.parametrize("loop", OTHERS)
def test_another_loop_gives_torchs_losses_weights_and_buffers_in_each_process(others, loop):
    for process in others:
        assert process[loop]["loss"] < 1e-6
        assert process[loop]["state"] < 1e-6
