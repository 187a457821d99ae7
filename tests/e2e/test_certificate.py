"""`Trainer.verify` and `jaxtrain verify --module`: agreement is shown, and the first layer that departs is named."""

import copy
import json

import jax.numpy as jnp
import pytest
import torch
from torch import nn

from jaxtrain import Trainer, TrainingConfig, UserError
from jaxtrain.optim import optimizer
from torch_bridge import verify
from torch_bridge.lowering import TABLE

STEPS = 5


class Net(nn.Module):
    """Dropout, running statistics and a layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.fc1, self.norm, self.twice = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.drop, self.act, self.head = nn.Dropout(0.3), nn.ReLU(inplace=True), nn.Linear(8, 1)

    def forward(self, x):
        x = self.twice(self.norm(self.fc1(x)))
        return self.head(self.act(self.twice(self.drop(x))))


def make_data():
    torch.manual_seed(1)
    x = torch.randn(20, 3)
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def trainer_of(module, tmp_path, **options):
    config = TrainingConfig(batch_size=8, run={"dir": str(tmp_path / "run")})
    return Trainer(module, make_data(), None, config, loss=nn.MSELoss(), **options)


def test_a_module_agrees_and_is_left_as_it_was(tmp_path):
    torch.manual_seed(0)
    module = Net()
    adam = torch.optim.AdamW(module.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(adam, 2)
    before = copy.deepcopy(module.state_dict())
    found = trainer_of(module, tmp_path, optimizer=adam, scheduler=scheduler).verify(STEPS)
    assert found.agrees, str(found)
    checks = {check.name: check for check in found.checks}
    assert [d.name for d in checks["training"].differences][:5] == ["fc1", "norm", "twice", "drop", "twice, call 2"]
    assert len(checks["gradients"].differences) == 8
    assert "4 rows" in checks["uneven"].claim
    assert len([d for d in checks["updates"].differences if d.kind == "loss"]) == STEPS
    assert {"torch, fp32", "jaxtrain, fp32", "jaxtrain, bf16"} <= set(found.curves)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert (module.drop.p, adam.state, adam.param_groups[0]["lr"]) == (0.3, {}, 1e-2)
    assert not (tmp_path / "run").exists()


class Encoder(nn.Module):
    """Hands on the hidden states, its input first, of which all have one shape."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]).tanh())
        return states[-1], states


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.encoder, self.head = nn.Linear(3, 8), Encoder(), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x))[0])


def test_values_that_a_layer_hands_on_are_compared_where_they_were_made(tmp_path):
    """As DeBERTa's encoder, whose input was taken for an output of its own: 0.7 off."""
    torch.manual_seed(0)
    found = trainer_of(Stacked(), tmp_path).verify(2)
    assert found.agrees, str(found)
    names = [d.name for d in found.checks[0].differences if d.kind == "output"]
    assert names == ["embed", "encoder.layers.0", "encoder.layers.1", "encoder", "head"]


@pytest.mark.slow
def test_an_operator_that_departs_is_named_by_its_layer(tmp_path, monkeypatch):
    monkeypatch.setitem(TABLE, "aten.relu.default", lambda call, x: jnp.maximum(x, 0) * 1.01)
    found = trainer_of(Net(), tmp_path).verify(STEPS)
    check, first = found.first
    assert (check.name, first.kind, first.name) == ("evaluation", "output", "act")
    assert 0.009 < first.size < 0.011
    assert found.sentence.startswith("the output of act departs first: relative difference 1.0e-02")


@pytest.mark.slow
def test_updates_that_are_too_large_by_two_in_a_hundred_depart(tmp_path, monkeypatch):
    right = optimizer._moved
    wrong = lambda param, update, rate, decay, accept: right(param, update, 1.02 * rate, decay, accept)
    monkeypatch.setattr(optimizer, "_moved", wrong)
    check, first = trainer_of(Stacked(), tmp_path).verify(STEPS).first
    assert check.name == "updates"
    assert first.size > 0.001


@pytest.mark.slow
def test_a_module_that_draws_in_evaluation_is_refused(tmp_path):
    class Noisy(nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.randn_like(x[:, :1])

    with pytest.raises(UserError, match="draws random numbers in evaluation mode"):
        trainer_of(Noisy(3, 1), tmp_path).verify(STEPS)


@pytest.mark.slow
def test_the_command_writes_a_page_and_its_json(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ["--module", f"{__name__}:Net", "--data", f"{__name__}:make_data", "--loss", "torch.nn:MSELoss"]
    assert verify.main([*given, "--steps", str(STEPS), "--output", "certificate"]) == 0
    assert "Net in JAX equals torch in" in capsys.readouterr().out
    found = json.loads((tmp_path / "certificate/certificate.json").read_text())
    assert found["agrees"]
    assert found["subject"]["parameters"] == sum(p.numel() for p in Net().parameters())
    page = (tmp_path / "certificate/certificate.html").read_text()
    assert page.count("<tr>") > 30
    assert "twice, call 2" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")  # a name, no address


def test_a_scripts_run_is_compared_with_its_module_under_torch(tmp_path, capsys):
    torch.manual_seed(0)
    trainer_of(Net(), tmp_path).train()
    here, run = __name__, str(tmp_path / "run")
    assert verify.main(["--run", run, "--quiet"]) == 2
    assert "--module PKG:FUNCTION --data PKG:FUNCTION" in capsys.readouterr().err
    named = ["--module", f"{here}:Net", "--data", f"{here}.make_data", "--loss", "torch.nn:MSELoss", "--steps", "2"]
    assert verify.main(["--run", run, *named]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{here}:Net in JAX beside itself in torch, both with the weights of {run} (")
    assert verify.main(["--run", run, "--module", "torch.nn:Identity", *named[2:]]) == 2
    assert "the weights of" in capsys.readouterr().err
