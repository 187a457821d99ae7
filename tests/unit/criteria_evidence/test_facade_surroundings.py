"""Seeds, determinism and the device, which torch alone decides."""

import json
import logging
import types
from unittest import mock

import numpy as np
import torch

from jaxtrain.systems import criteria_evidence as psy


def test_seeds_and_the_device_are_torchs(capsys, monkeypatch):
    monkeypatch.setattr(torch.backends, "cudnn", types.SimpleNamespace())  # other tests lock the flags of the process
    assert psy.set_seed(7, deterministic=False, cudnn_benchmark=True) == 7
    assert torch.backends.cudnn.benchmark
    first = (torch.rand(1), np.random.rand())
    psy.set_seed(7)
    assert not torch.backends.cudnn.benchmark
    assert (torch.rand(1), np.random.rand()) == first
    torch.use_deterministic_algorithms(False)
    assert psy.get_device(prefer_cuda=False) == torch.device("cpu")
    assert "cpu" in capsys.readouterr().out


def test_determinism_is_strict_as_in_the_original(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.backends, "cudnn", types.SimpleNamespace())
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *given, **named: calls.append((given, named)))
    psy.set_seed(7)
    assert calls == [((True,), {})]


def test_the_device_tells_what_torch_tells_of_it(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "V100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: mock.MagicMock(total_memory=16e9))
    assert psy.get_device(device_id=1) == torch.device("cuda:1")
    assert "V100" in (printed := capsys.readouterr().out)
    assert "BFloat16" not in printed


def test_relative_stores_lie_under_the_projects_folder(tmp_path):
    assert psy.resolve_tracking_uri("sqlite:///mlflow.db", tmp_path) == f"sqlite:///{tmp_path / 'mlflow.db'}"
    assert psy.resolve_tracking_uri("sqlite:////var/x.db", tmp_path) == "sqlite:////var/x.db"
    assert psy.resolve_tracking_uri("http://host:5000", tmp_path) == "http://host:5000"
    assert psy.resolve_tracking_uri("mlruns", tmp_path) == (tmp_path / "mlruns").as_uri()
    assert psy.resolve_artifact_location(None, tmp_path) is None
    assert psy.resolve_artifact_location("artifacts", tmp_path) == (tmp_path / "artifacts").as_uri()
    assert psy.resolve_artifact_location("s3://bucket/a", tmp_path) == "s3://bucket/a"


def test_folders_of_trials_are_made_pruned_and_summed_up(tmp_path):
    folder = psy.ensure_directory(tmp_path / "a" / "b")
    (folder / "old").mkdir()
    (folder / "old" / "x.txt").write_text("x")
    path = psy.archive_trial_summary(folder, 3, {"lr": 1e-5}, {"f1": 0.5}, {"seed": 1})
    psy.prune_directory_except(folder, ["trial_3.json"])
    assert [entry.name for entry in folder.iterdir()] == ["trial_3.json"]
    assert json.loads(path.read_text()) == {
        "trial_number": 3,
        "params": {"lr": 1e-5},
        "metrics": {"f1": 0.5},
        "seed": 1,
    }
    psy.prune_directory_except(tmp_path / "none", [])


def test_a_logger_prints_each_line_once(capsys):
    for _ in range(2):
        logger = psy.get_logger("psy-test", logging.WARNING)
    logger.warning("one line")
    logger.info("no line")
    assert capsys.readouterr().err.count("line") == 1
