"""What a config, a trainer and a compiled step show of themselves when they are printed."""

import io

import pytest
import torch

import jaxtrain
from jaxtrain import Trainer, TrainingConfig


def _in_rich(value):
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=100)
    console.print(value)
    return console.file.getvalue()


def test_a_printed_config_has_what_differs_from_the_defaults():
    assert repr(TrainingConfig()) == "TrainingConfig()"
    shown = repr(TrainingConfig(batch_size=32, num_epochs=2))
    assert shown == "TrainingConfig(data=DataConfig(batch_size=32), train=TrainConfig(epochs=2))"


def test_a_printed_trainer_says_what_it_trains_how_far_and_where(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = torch.utils.data.TensorDataset(torch.randn(16, 3), torch.randn(16, 1))
    config = TrainingConfig(batch_size=8, num_epochs=2)
    trainer = Trainer(torch.nn.Linear(3, 1), data, None, config, loss=torch.nn.MSELoss())
    assert repr(trainer) == "Trainer(Linear, step 0 of 4, runs/run)"
    shown = _in_rich(trainer)
    assert shown.startswith("Trainer(\n    'Linear',\n    step='0 of 4',\n    folder='runs/run',\n    best=None,\n")
    assert "data=DataConfig(batch_size=8)" in shown
    assert trainer.describe().startswith("Linear: 4 trained parameters, 0 frozen\n")
    planned = Trainer(torch.nn.Linear(3, 1), data, None, config, loss=torch.nn.MSELoss(), abstract=True)
    assert repr(planned) == "Trainer(Linear, 4 steps, runs/run)"


def test_a_printed_step_names_its_loss_and_counts_its_calls():
    module = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(module.parameters(), 1e-2)

    def squared(module, batch):
        return module(batch).square().mean()

    step = jaxtrain.compile(module, squared, optimizer, wait=True)
    step(torch.ones(4, 3))
    assert repr(step) == "CompiledStep(squared, calls: 1, programs: 1)"
    shown = _in_rich(step)
    assert shown.startswith("CompiledStep('squared', calls=1, programs=1, runs=['squared, graph 1: ")
