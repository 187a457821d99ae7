"""What worker processes leave behind: nothing, however they and their run end."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest

from jaxtrain.data import shared_memory, workers
from jaxtrain.data.loader import make_reader
from jaxtrain.data.sample_reader import Request
from jaxtrain.data.widths import TooLarge, narrow
from jaxtrain.errors import DataError


class Raising:
    """Raises `error` at sample 5; sleeps there where it is None."""

    def __init__(self, error: BaseException | None = None):
        self.error = error

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict:
        if index == 5 and self.error is not None:
            raise self.error
        if index == 5:
            time.sleep(1000)
        return {"x": np.zeros(1 << 18, np.float32), "label": 2**40 if index == 6 else index}


def read(source, positions) -> dict:
    return make_reader(source, None, 4, 0)(Request(0, np.array(positions), np.array(positions)))


@pytest.mark.parametrize("error", [StopIteration(), SystemExit(0), GeneratorExit(), ValueError("no")])
def test_whatever_a_sample_raises_fails_with_its_index(error):
    with pytest.raises(DataError, match=f"raised at sample 5: {type(error).__name__}"):
        read(Raising(error), [4, 5])


def test_an_integer_beyond_32_bits_fails_with_its_index():
    with pytest.raises(DataError, match=r"1099511627776\) does not fit .*\(sample 6\)"):
        read(Raising(), [4, 6])


def test_an_integer_beyond_32_bits_knows_its_row():
    with pytest.raises(TooLarge) as refused:
        narrow(np.array([[0, 1], [2, -(2**31) - 1]]))
    assert refused.value.row == 1


def test_a_batch_leaves_no_name_in_shared_memory():
    segment, handle = shared_memory._create(1 << 20)
    assert os.fstat(handle).st_nlink == 0
    segment.close()
    os.close(handle)


def test_a_dataset_on_its_way_to_workers_has_no_name(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    frozen = shared_memory.Frozen({"x": np.zeros(1 << 18)})
    assert list(tmp_path.iterdir()) == []
    assert os.fstat(frozen.ticket().handle).st_size == 1 << 21
    frozen.close()


def test_workers_get_the_dataset_and_give_batches_without_a_name():
    pool = workers.ProcessPool(make_reader(Raising(), None, 2, 0), 2, 60)
    pool.start()
    pool.send(0, Request(0, np.array([1, 2]), np.array([1, 2])))
    assert pool.receive(0)["label"].tolist() == [1, 2]
    pool.close()


PARENT = """
import numpy as np, sys, time
from jaxtrain.data import workers
from jaxtrain.data.loader import make_reader
from jaxtrain.data.sample_reader import Request
from tests.unit.engine.test_worker_leftovers import Raising

if __name__ == "__main__":
    pool = workers.ProcessPool(make_reader(Raising(), None, 2, 0), 1, 600)
    pool.start()
    pool.send(0, Request(0, np.array([1]), np.array([1])))
    pool.receive(0)
    pool.send(0, Request(0, np.array([5]), np.array([5])))
    while "5" not in pool.reading():
        time.sleep(0.05)
    print(pool._processes.processes[0].pid, flush=True)
    time.sleep(600)
"""


def test_a_worker_in_the_middle_of_a_sample_ends_with_its_killed_run():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    stat, deadline = pathlib.Path(f"/proc/{worker}/stat"), time.monotonic() + 10
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert time.monotonic() < deadline
