"""Loops around compiled steps of DistributedDataParallel modules, in two processes, give torch's numbers."""

import json
from collections.abc import Iterable

import pytest

from tests import processes
from tests.e2e.ddp_loops import LOOPS, REFUSALS

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
    return told([*COMMON, *REFUSALS])


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


def test_a_loss_that_torch_runs_in_one_process_stays_compiled_in_the_other(common):
    assert [process["a_loss_that_torch_runs_in_one_process"]["torch"] for process in common] == [False, True]


SENTENCES = {
    "a_hook": "module0: fp16_compress_hook of register_comm_hook averages gradients inside torch's backward pass",
    "join": "module0: DistributedDataParallel.join() lets processes end apart",
    "an_unused_parameter": "module0: second.weight gets no gradient from this loss",
    "unfreezing": "module0: 0.weight has been added or unfrozen since DistributedDataParallel was made",
    "another_processs_gradients": "load_state_dict: gradients wait in this state, and they are those of process",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_not_torchs_by_construction_is_refused(common, case):
    for process in common:
        assert process[case].startswith(SENTENCES[case])
