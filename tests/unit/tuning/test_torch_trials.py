"""`jaxtrain.tune --vmap` for `task: torch_module`: trials of one program, each as its own run."""

import json
import pathlib

import pytest

from jaxtrain import tune

CONFIG = """
task: torch_module
model: {target: tests.unit.tuning.small_torch.net, kwargs: {dropout: 0.2}}
data: {target: tests.unit.tuning.small_torch.data, batch_size: 16}
loss: {target: torch.nn.CrossEntropyLoss, kwargs: {label_smoothing: 0.1}}
train: {epochs: 2}
tracking: {tensorboard: false}
shard: {devices: 1}
"""
SPACE = """
study: {trials: 3, sampler: {name: random}, pruner: {name: none}}
seed: {type: int, low: 1, high: 9}
optim.lr: {type: loguniform, low: 1.0e-3, high: 1.0e-2}
model.kwargs.dropout: {type: uniform, low: 0.1, high: 0.5}
loss.kwargs.label_smoothing: {type: uniform, low: 0.01, high: 0.2}
"""


def test_modules_that_differ_in_numbers_train_in_one_program_as_each_would_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("config.yaml").write_text(CONFIG)
    pathlib.Path("space.yaml").write_text(SPACE)
    given = ["--config", "config.yaml", "--space", "space.yaml", "--no-plots", "--output"]
    assert tune.main([*given, "together", "--vmap", "3"]) == 0
    assert "training steps compiled: 1\n" in capsys.readouterr().out
    assert tune.main([*given, "alone"]) == 0
    trials = {name: json.loads(pathlib.Path(name, "trials_history.json").read_text()) for name in ("together", "alone")}
    value = {name: {trial["number"]: trial["value"] for trial in found} for name, found in trials.items()}
    assert value["together"] == pytest.approx(value["alone"], rel=1e-5)
    settings = pathlib.Path("together/trials/0000/config.yaml").read_text()
    assert "dropout" in settings
