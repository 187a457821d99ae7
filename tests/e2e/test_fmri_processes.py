"""BatchNorm over the whole batch: four processes train as one, running statistics included."""

import pathlib

import numpy as np
import pytest

from tests.processes import curve, difference, run
from torch_bridge import files

CONFIG = str(pathlib.Path(__file__).parents[2] / "configs/sherlock_head_tiny.yaml")
QUICK = ("data.synthetic_volumes=40", "train.epochs=1", "train.log_every_steps=1", "tracking.tensorboard=false")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_four_processes_keep_the_running_statistics_of_one(strategy, tmp_path):
    weights = {}
    for processes in (1, 4):
        folder = tmp_path / str(processes)
        run(processes, "--config", CONFIG, f"run.dir={folder}", f"shard.strategy={strategy}", *QUICK)
        weights[processes] = {k: np.asarray(v) for k, v in files.load(folder / "exports" / "best.pt").items()}
    assert difference(curve(tmp_path / "1"), curve(tmp_path / "4")) < 1e-5
    statistics = [key for key in weights[1] if key.endswith(("running_mean", "running_var", "num_batches_tracked"))]
    assert len(statistics) == 75
    for key in statistics:
        np.testing.assert_allclose(weights[4][key], weights[1][key], rtol=1e-4, atol=1e-5, err_msg=key)
    assert weights[4]["encoder.layer5.1.num_batches_tracked"] == 4
