"""`jaxtrain debug` names the module, the line and the samples of a step that is not finite."""

import pytest
import torch
from torch import nn

from jaxtrain import Trainer, TrainingConfig, debug, run
from jaxtrain.errors import UserError
from tests.e2e import broken_nets
from torch_bridge.training import faults

YAML = """
task: torch_module
model: {{target: tests.e2e.broken_nets.{net}}}
data: {{target: tests.e2e.broken_nets.Rows, batch_size: 8, shuffle: false}}
loss: {{target: torch.nn.MSELoss, target_key: y}}
train: {{steps: 4}}
evaluation: {{every_epochs: null}}
checkpoint: {{every_steps: 1}}
tracking: {{tensorboard: false}}
"""


def written(tmp_path, net):
    (tmp_path / "config.yaml").write_text(YAML.format(net=net))
    return str(tmp_path / "config.yaml"), str(tmp_path / "run")


def test_an_operator_its_module_and_row_are_named():
    net, data = broken_nets.LogNet(), broken_nets.Rows("train")
    found = faults.find(net, lambda: nn.functional.mse_loss(net(data.x), data.y), len(data))
    assert found.output.module == "log (Log)"
    assert (found.output.what, found.output.operator, found.output.rows) == ("infinity", "log", (broken_nets.BAD,))
    assert found.output.line.endswith("return torch.log(x)")
    assert "head.weight" in found.gradients


def test_a_gradient_alone_is_found():
    net, data = broken_nets.RootNet(), broken_nets.Rows("train")
    found = faults.find(net, lambda: nn.functional.mse_loss(net(data.x), data.y), len(data))
    assert found.output is None
    assert found.gradient.operator == "the backward pass of Pow"
    assert found.gradient.line.endswith("return self.head(torch.sqrt(self.stem(x) ** 2))[:, 0]")
    assert found.gradients == ["stem.weight"]


def test_a_mask_of_infinities_is_no_fault():
    net = nn.Linear(4, 4)

    def loss():
        scores = net(torch.ones(2, 4)).masked_fill(torch.tensor([True, False, False, False]), float("-inf"))
        return torch.softmax(scores, -1).sum()

    found = faults.find(net, loss, 2)
    assert (found.output, found.gradient, found.gradients) == (None, None, [])


@pytest.mark.slow
def test_the_command_that_the_message_names_finds_the_line(tmp_path, capsys):
    config, folder = written(tmp_path, "LogNet")
    assert run.main(["--config", config, f"run.dir={folder}"]) == 1
    assert f"`jaxtrain debug --run {folder} --step 1 --trust` names the module and the line" in capsys.readouterr().err
    assert debug.main(["--run", folder, "--step", "1", "--trust"]) == 1
    out = capsys.readouterr().out
    assert "step 1: from the beginning, 0 steps run again\njax: loss nan" in out
    assert "the first output that is not finite: infinity by log in log (Log), at " in out
    assert f"samples: {broken_nets.BAD}\n" in out


@pytest.mark.slow
def test_a_step_is_replayed_from_the_checkpoint_before_it(tmp_path, capsys):
    config, folder = written(tmp_path, "RootNet")
    assert run.main(["--config", config, f"run.dir={folder}", "data.drop_last=true", "train.nan_policy=skip"]) == 0
    assert debug.main(["--run", folder, "--step", "4", "--trust"]) == 0
    out = capsys.readouterr().out
    assert "step 4: from the checkpoint of step 3, 0 steps run again" in out
    assert out.endswith("loss and gradients are finite, and torch agrees\n")


def test_a_step_that_the_run_does_not_have_is_refused(tmp_path):
    config = TrainingConfig(run={"dir": str(tmp_path)}, data={"batch_size": 8}, train={"steps": 4})
    rows = broken_nets.Rows("train")
    loss = lambda model, batch, rngs: (model(batch["x"]) ** 2).mean()
    from jaxtrain import nn as layers
    from jaxtrain.runtime.prng import initial_rngs

    trainer = Trainer(layers.Linear(4, 1, rngs=initial_rngs(0)), rows, None, config, loss=loss)
    with pytest.raises(UserError, match="--step 9: the run has steps 1 to 4"):
        debug.examine(trainer, 9)
