"""`torchrun my_script.py` with a Trainer: the processes find each other and train one model."""

import re

import pytest

from tests.processes import end, run, start


def trained(outputs: list[str]) -> list[str]:
    return [re.search(r"trained: (.*)", output).group(1) for output in outputs]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return trained(run(1, str(tmp_path_factory.mktemp("alone") / "run"), module="tests.e2e.own_script"))[0]


@pytest.mark.parametrize(
    "launcher",
    ["torchrun", pytest.param("slurm", marks=pytest.mark.slow), pytest.param("openmpi", marks=pytest.mark.slow)],
)
def test_two_processes_of_a_script_train_the_model_of_one(launcher, alone, tmp_path):
    """Though each draws other first weights: process 0's count, as under DistributedDataParallel."""
    outputs = run(2, str(tmp_path / "run"), module="tests.e2e.own_script", launcher=launcher)
    found = trained(outputs)
    assert found[0] == found[1]
    assert [float(value) for value in found[0].split()] == pytest.approx([float(v) for v in alone.split()], abs=2e-5)
    assert "process 0 of 2, the CPU" in outputs[0]
    assert (tmp_path / "run" / "exports" / "best.pt").is_file()


@pytest.mark.slow
def test_an_error_in_one_process_ends_it_at_once_with_its_traceback(tmp_path):
    running = start(2, str(tmp_path / "run"), "raise", module="tests.e2e.own_script")
    try:
        assert running[1].wait(240) == 1
        assert "ValueError: rank 1 is broken" in running[1].output()
    finally:
        end(running)
