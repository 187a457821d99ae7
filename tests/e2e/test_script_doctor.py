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


def test_the_loss_of_a_plain_loop_is_compiled_from_its_lines(examined):
    found = examined(PLAIN)
    (step,) = found["steps"]
    assert step["in_torch"] == ""
    assert (step["programs"], step["shapes"], step["batches"]) == (1, 1, 8)
    assert step["where"].endswith("train.py:10")
    assert found["verdict"].startswith("plain torch (8 updates seen)")
    assert "line 10 becomes loss_fn(module, batch), and jaxtrain.compile" in found["next"]


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


UPDATE = """
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
SCRIPTS = {  # body -> programs, and what the forecast has to say
    "a branch on a value in the module's code": (
        "for _ in range(50):\n"
        "    out = net(torch.randn(8, 4))\n"
        "    loss = out.mean() if out.sum().item() > 0 else -out.mean()" + UPDATE,
        0, "train.py:9",
    ),
    "SciPy inside the loss": (
        "from scipy.optimize import linear_sum_assignment\n"
        "for _ in range(50):\n"
        "    out = net(torch.randn(8, 4))\n"
        "    rows, columns = linear_sum_assignment(out.detach().numpy())\n"
        "    loss = out[torch.as_tensor(rows)].mean()" + UPDATE,
        0, "train.py:10",
    ),
    "a new length in every batch": (
        "for i in range(50):\n"
        "    x = torch.randn(8 + i, 4)\n"
        "    loss = net(x).square().mean()" + UPDATE,
        8, "pad them to a few",
    ),
    "a loss that a function of the script's computes, and a line that logs it": (
        "def criterion(x):\n"
        "    return (net(x) - x.sum(1, keepdim=True)).abs().mean()\n"
        "total = 0.0\n"
        "for _ in range(50):\n"
        "    loss = criterion(torch.randn(8, 4))\n"
        "    total += loss.item()" + UPDATE,
        1, "line 11 becomes loss_fn",
    ),
    "two optimizers": (
        "other = nn.Linear(1, 1); second = torch.optim.SGD(other.parameters(), lr=0.1)\n"
        "for _ in range(50):\n"
        "    x = torch.randn(8, 4); out = net(x)\n"
        "    wrong = other(out.detach()).square().mean()\n"
        "    second.zero_grad(); wrong.backward(); second.step()\n"
        "    loss = other(out).mean()" + UPDATE,
        2, "jaxtrain.compile_many",
    ),
    "accelerate": (
        "from accelerate import Accelerator\n"
        "accelerator = Accelerator(cpu=True)\n"
        "net, optimizer = accelerator.prepare(net, optimizer)\n"
        "for _ in range(50):\n"
        "    x = torch.randn(8, 4)\n"
        "    loss = net(x).square().mean()\n"
        "    optimizer.zero_grad(); accelerator.backward(loss); optimizer.step()\n",
        2, "line 7: from jaxtrain.accelerate import Accelerator",
    ),
}  # fmt: skip


@pytest.mark.slow  # each runs a script, and its forecast, in processes of their own
@pytest.mark.parametrize("kind", SCRIPTS)
def test_the_forecast_counts_programs_and_names_the_change(examined, kind):
    body, programs, said = SCRIPTS[kind]
    found = examined(body)
    assert sum(step["programs"] for step in found["steps"]) == programs
    assert said in found["next"]
    assert found["error"] == ""
