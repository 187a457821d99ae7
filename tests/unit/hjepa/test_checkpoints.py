"""The original's checkpoint files and their bookkeeping."""

import json
import pathlib

import numpy as np
import pytest
import torch

from jaxtrain.errors import UserError
from jaxtrain.systems.hjepa.original.torch_checkpoint import CheckpointManager, read_checkpoint

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "hjepa"
CASES = json.loads((GOLDEN / "checkpoint_semantics.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["config"]["metric_name"] + case["config"]["mode"])
def test_files_and_best_list_equal_the_originals(case, tmp_path):
    options = {key: value for key, value in case["config"].items() if key != "seq"}
    manager = CheckpointManager(tmp_path, **options)
    for entry in case["log"]:
        epoch, value = entry["epoch"], entry["metric"]
        is_best = manager.update_best_metric(value)
        assert is_best == entry["is_best"]
        if manager.should_save(epoch) or is_best:
            manager.save_checkpoint(epoch, {"w": np.zeros(1)}, metrics={"val_loss": value}, is_best=is_best)
        assert sorted(path.name for path in tmp_path.iterdir()) == entry["files"]
        best = [[path.name, epoch, metric] for path, epoch, metric in manager.best_checkpoints]
        assert best == entry["best_list"]
        assert read_checkpoint(manager.get_best_checkpoint())["epoch"] == entry["epoch_in_best_file"]
        assert read_checkpoint(manager.get_latest_checkpoint())["epoch"] == entry["epoch_in_latest_file"]
    manager.cleanup_old_checkpoints(keep_last_n=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == case["files_after_cleanup_keep_last_1"]


def test_the_originals_file_reads_with_its_optimizer_and_counters():
    case = json.loads((GOLDEN / "sample_checkpoint.json").read_text())
    content = read_checkpoint(GOLDEN / case["file"])
    assert list(content) == case["top_level_keys"]
    assert (content["epoch"], content["global_step"], content["best_metric"]) == (0, 3, 0.5)
    assert sorted(content["optimizer_state_dict"]["state"]) == case["optimizer_state_indices"]


def test_numpy_scalars_that_torch_refuses_are_read(tmp_path):
    torch.save({"model_state_dict": {}, "metrics": {"val_loss": np.float64(0.25)}}, tmp_path / "c.pth")
    assert read_checkpoint(tmp_path / "c.pth")["metrics"]["val_loss"] == 0.25


def test_a_file_that_runs_code_is_refused(tmp_path):
    torch.save({"model_state_dict": {}, "metrics": pathlib.Path("x")}, tmp_path / "c.pth")
    with pytest.raises(UserError, match="cannot be read as a torch checkpoint"):
        read_checkpoint(tmp_path / "c.pth")


def test_a_torch_module_and_its_optimizer_come_back(tmp_path):
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    path = CheckpointManager(tmp_path).save_checkpoint(0, module, optimizer, metrics={"val_loss": 1.0})
    fresh = torch.nn.Linear(3, 2)
    restored = torch.optim.AdamW(fresh.parameters())
    CheckpointManager(tmp_path).load_checkpoint(path, fresh, restored)
    torch.testing.assert_close(fresh.weight, module.weight)
    torch.testing.assert_close(
        restored.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"]
    )
