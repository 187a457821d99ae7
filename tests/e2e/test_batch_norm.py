"""BatchNorm sees the whole batch: four processes train as one, running statistics included."""

import numpy as np
import pytest

from tests.processes import curve, difference, run
from torch_bridge import files

pytestmark = pytest.mark.slow

CONFIG = """
task: tests.e2e.normalised_net.train
data: {batch_size: 16, placement: host}
optim: {name: sgd, lr: 0.05}  # Adam would turn rounding noise, all that fc1.bias gets, into steps of its rate
train: {epochs: 1, log_every_steps: 1}
tracking: {tensorboard: false}
"""


def test_four_processes_keep_the_running_statistics_of_one(tmp_path):
    (tmp_path / "net.yaml").write_text(CONFIG)
    weights = {}
    for processes in (1, 4):
        run(processes, "--config", str(tmp_path / "net.yaml"), f"run.dir={tmp_path / str(processes)}")
        weights[processes] = files.load(tmp_path / str(processes) / "exports" / "best.pt")
    assert difference(curve(tmp_path / "1"), curve(tmp_path / "4")) < 1e-5
    for name in ("running_mean", "running_var", "weight", "bias"):
        np.testing.assert_allclose(weights[4][f"bn1.{name}"], weights[1][f"bn1.{name}"], rtol=1e-5, atol=1e-6)
    assert weights[4]["bn1.num_batches_tracked"] == 5
