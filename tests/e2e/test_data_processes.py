"""Data across processes and workers: the same global batches, nothing lost or repeated, trouble named."""

import json
import pathlib
import shutil

import numpy as np
import pytest

from jaxtrain.train import run_dir
from tests.e2e.counting_task import SAMPLES
from tests.e2e.sample_ids import EPOCHS, samples
from tests.processes import finish, run, start
from torch_bridge.state_dict import state_dict

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[list[int]]:
    """The samples of every global batch, read by one process without workers."""
    return samples(tmp_path_factory.mktemp("alone"), 0)


def test_one_process_reads_every_sample_once_in_each_epoch(alone):
    steps = len(alone) // EPOCHS
    for epoch in range(EPOCHS):
        assert sorted(sum(alone[epoch * steps : (epoch + 1) * steps], [])) == list(range(SAMPLES))


@pytest.mark.parametrize(("processes", "workers"), [(2, ("0", "4")), (4, ("0", "1"))])
def test_processes_with_and_without_workers_read_the_same_global_batches(processes, workers, alone, tmp_path):
    """One process with 0, 1 and 4 workers: tests/unit/bridge/test_data.py."""
    run(processes, str(tmp_path), *workers, module="tests.e2e.sample_ids")
    parts = [json.loads((tmp_path / f"{processes}-{i}.json").read_text()) for i in range(processes)]
    for count in workers:
        assert [sum(shares, []) for shares in zip(*(part[count] for part in parts), strict=True)] == alone


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> pathlib.Path:
    """A run of two processes that stopped after 8 of 12 steps: in its second epoch, two batches after the first."""
    folder = tmp_path_factory.mktemp("stopped")
    run(2, *arguments(folder), "train.steps=8", "data.num_workers=1")
    return folder


def arguments(folder: pathlib.Path) -> list[str]:
    config = folder.parent / f"{folder.name}.yaml"
    config.write_text("task: tests.e2e.counting_task.count\ndata: {batch_size: 8}\n")
    schedule = ("optim.schedule.name=constant", "tracking.tensorboard=false")
    return ["--config", str(config), f"run.dir={folder}", *schedule]


@pytest.mark.parametrize("processes", [1, 4])
def test_a_run_stopped_mid_epoch_on_2_processes_goes_on_with_not_one_sample_lost_or_repeated(
    processes, stopped, tmp_path
):
    seen = lambda folder: state_dict(run_dir.load_model(folder, "last")[2])["seen"]
    shutil.copytree(stopped, tmp_path / "run")
    assert sorted(np.unique(seen(tmp_path / "run"))) == [1, 2]  # some samples of the second epoch are still to come
    run(processes, *arguments(tmp_path / "run"), "train.steps=12")
    np.testing.assert_array_equal(seen(tmp_path / "run"), np.full(SAMPLES, 2))


@pytest.mark.parametrize(
    ("trouble", "workers", "cause"),
    [
        ("raise", 0, "the dataset raised at sample 13: KeyError: 'no such column'"),
        ("die", 2, "was killed by SIGKILL at sample 13"),
        ("hang", 2, "has been at sample 13 for more than 3 s (data.timeout_s)"),
    ],
)
def test_a_sample_that_ends_a_run_is_named_with_its_cause_and_exit_code_1(trouble, workers, cause, tmp_path):
    more = (f"data.trouble={trouble}", f"data.num_workers={workers}", "data.timeout_s=3", "train.epochs=1")
    code, output = finish(start(1, *arguments(tmp_path / "run"), *more), 120)[0]
    assert code == 1, output
    assert cause in output
    assert "Traceback" not in output
