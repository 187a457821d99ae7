"""`jaxtrain.doctor --script`: what of a training script compiles, without training."""

import json

import pytest

from jaxtrain import script_doctor

HEAD = """
import pathlib, torch, jaxtrain
from torch import nn
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(net.parameters())
steps = 0
"""
PLAIN = """
for _ in range(50):
    x = torch.randn(8, 4)
    loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
pathlib.Path(__file__).with_name("ended").touch()
"""
COMPILED = """
def loss_fn(net, x):
    return (net(x) - x.sum(1, keepdim=True)).square().mean()
step = jaxtrain.compile(net, loss_fn, optimizer)
for _ in range(50):
    step(torch.randn(8, 4))
pathlib.Path(__file__).with_name("ended").touch()
"""


@pytest.fixture
def examined(tmp_path):
    def run(body: str) -> dict:
        script = tmp_path / "train.py"
        script.write_text(HEAD + body)
        found = script_doctor.examine(str(script), [])
        assert not (tmp_path / "ended").exists()  # it was stopped
        assert json.dumps(found)
        return found

    return run


def test_modules_of_a_plain_torch_script_are_told_to_convert(examined):
    found = examined(PLAIN)
    assert found["modules"] == [{"module": "Sequential", "parameters": 49, "one_program": True, "why": ""}]
    assert found["verdict"].startswith("plain torch (3 updates seen)")
    assert "jaxtrain.compile" in found["next"]


def test_a_compiled_step_is_told_with_its_programs_and_first_call(examined):
    found = examined(COMPILED)
    (step,) = found["steps"]
    assert step["name"] == "loss_fn"
    assert step["in_torch"] == ""
    assert step["programs"] >= 1
    assert step["first_call_s"] > 0
    assert found["verdict"] == "runs as compiled programs"


def test_an_error_of_the_script_is_told(examined):
    found = examined("raise ValueError('no data here')")
    assert found["error"] == "ValueError: no data here"
    assert found["verdict"] == "nothing was compiled"
