"""A wait of more than some seconds is told: what goes on, how far it is, how long it took before, what it was for."""

import re
import sys
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.symbolic_convert import InstructionTranslatorBase

import jaxtrain
from jaxtrain import Trainer, TrainingConfig
from jaxtrain.compiled_step import step as steps
from jaxtrain.runtime import waits
from jaxtrain.runtime.waits import Waits
from torch_bridge.capture import torch_api
from torch_bridge.capture.module_call import compile_calls
from torch_bridge.from_torch import from_torch


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(waits, "LONG_S", 0.05)


def test_a_long_wait_is_told_with_the_line_and_the_time_before(soon, caplog):
    made = Waits("Net", lambda frame: "net.py:3")
    for _ in range(2):
        with made.during("is recorded", "inputs of shapes (4, 8)"):
            time.sleep(0.2)
    told = caplog.messages
    assert told[0] == "Net is recorded, 0 s so far, now at net.py:3"
    assert told[-1].endswith("now at net.py:3; the last time took 0 s")
    assert told.count("Net is recorded in 0 s, once for inputs of shapes (4, 8)") == 1
    assert made.spent_s == pytest.approx(0.4, abs=0.3)


def test_a_wait_is_never_silent_for_longer_than_the_limit(soon, caplog, monkeypatch):
    assert waits.SILENT_S <= 30
    monkeypatch.setattr(waits, "SILENT_S", 0.05)
    with Waits("Net", lambda frame: "").during("is compiled"):
        time.sleep(1.0)
    assert len(caplog.messages) >= 8  # 5 if the pauses doubled


def test_the_first_weights_of_a_model_are_told(soon, caplog, tmp_path, monkeypatch):
    monkeypatch.setattr(waits, "LONG_S", 0.001)
    config = TrainingConfig(batch_size=8, max_steps=1, output_dir=str(tmp_path))
    Trainer(nn.Linear(3, 1), {"x": np.ones((8, 3), np.float32)}, None, config, loss=lambda output, batch: output.mean())
    assert any(text.startswith("the model gets its first weights, ") for text in caplog.messages)


def test_a_reader_that_is_being_made_has_no_line_yet():
    maker = type("Reader", (InstructionTranslatorBase,), {"__init__": lambda self: None})
    code = compile("def make(self, then):\n    return then()", torch_api._READER, "exec")
    names = {}
    exec(code, names)
    assert names["make"](maker(), lambda: torch_api.line_in(sys._getframe())) is not None


def test_a_short_wait_is_not_told(caplog):
    with Waits("Net", lambda frame: "").during("is compiled", "inputs of shapes (4, 8)"):
        pass
    assert not caplog.messages


def test_of_several_processes_the_first_tells(soon, caplog, monkeypatch):
    for rank in "10":
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("RANK", rank)
        with Waits(f"Net {rank}", lambda frame: "").during("is recorded", "inputs"):
            time.sleep(0.2)
    assert {message.partition(" is")[0] for message in caplog.messages} == {"Net 0"}


@torch.compiler.allow_in_graph
def slowly(x):
    time.sleep(1.0)
    return x + 0


def test_capturing_tells_the_users_line(soon, caplog):
    class Slow(nn.Linear):
        def forward(self, x):
            x = slowly(x)  # as a long forward pass
            return super().forward(x)

    for module in (nn.Linear(3, 1), Slow(3, 1)):  # the first imports what capture needs
        from_torch(module, torch.ones(2, 3))
    assert any("is captured" in text and "time.sleep(1.0)" in text for text in caplog.messages)


def test_capturing_and_compiling_tell_the_shapes(soon, caplog):
    module = nn.Linear(3, 1)
    step = jaxtrain.compile(module, lambda m, x: m(x).mean(), torch.optim.SGD(module.parameters(), 0.1))
    step(torch.ones(2, 3))
    assert any("is captured in" in text and "shapes (2, 3)" in text for text in caplog.messages)


def test_compiling_is_given_up_when_it_costs_more_than_torch_would(monkeypatch, caplog):
    monkeypatch.setattr(steps, "PATIENCE_S", 0.0)
    monkeypatch.setattr(waits, "PATIENCE_STEPS", 0)
    module, plain = nn.Linear(3, 1), nn.Linear(3, 1)
    plain.load_state_dict(module.state_dict())
    optimizer = torch.optim.Adam(plain.parameters())
    loss_fn = lambda m, x: m(x).pow(2).mean()
    step = jaxtrain.compile(module, loss_fn, torch.optim.Adam(module.parameters()))
    for rows in (4, 4, 5, 6, 4):  # compiled, again, timed in torch, given up
        x = torch.ones(rows, 3)
        loss = loss_fn(plain, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert float(step(x)) == pytest.approx(loss.item(), rel=1e-5)
    assert step.torch is not None
    assert "steps in torch would" in caplog.text
    assert "torch runs the steps from here on" in caplog.text


def test_steps_that_run_compiled_count_against_the_cost(monkeypatch):
    monkeypatch.setattr(steps, "PATIENCE_S", 0.0)
    monkeypatch.setattr(waits, "PATIENCE_STEPS", 10**9)
    module = nn.Linear(3, 1)
    step = jaxtrain.compile(module, lambda m, x: m(x).mean(), torch.optim.SGD(module.parameters(), 0.1))
    for rows in (4, 5, 6, 7):
        step(torch.ones(rows, 3))
    assert step.torch is None
    assert len(step.programs) == 3  # one step was timed


def test_a_module_under_accelerate_tells_its_waits(soon, caplog):
    layers = [part for _ in range(60) for part in (nn.Linear(3, 3), nn.Tanh())]  # XLA takes far longer than `soon`
    module = nn.Sequential(*layers)
    compile_calls([module])
    for _ in range(2):
        module(torch.ones(2, 3)).mean().backward()
    told = " | ".join(caplog.messages)
    assert re.search(r"a forward graph of \d+ operators is compiled, \d+ s so far", told)
    assert re.search(r"a backward graph of \d+ operators is compiled in \d+ s, once for inputs of shapes", told)


class Tagged(nn.Linear):
    tag = ""

    def forward(self, x):
        return super().forward(x) * len(self.tag)


def test_code_that_needs_more_forms_than_are_compiled_is_told_once_by_its_line(caplog):
    torch.manual_seed(0)
    module, x = Tagged(3, 1), torch.ones(2, 3)
    expected = float(module.weight.sum() + module.bias)
    compile_calls([module])
    values = []
    for count in range(1, 21):
        module.tag = "x" * count
        values.append(float(module(x)[0].detach()))
    assert values == pytest.approx([count * expected for count in range(1, 21)], abs=1e-5)
    (told,) = [message for message in caplog.messages if "forms" in message]
    assert told.startswith("16 forms of this code are compiled, and the next ones run in torch: module.tag == 'xx")
    assert told.endswith("changes (return super().forward(x) * len(self.tag))")
    assert "recompile_limit" not in caplog.text


def test_a_trainer_tells_its_waits(soon, caplog, capsys, tmp_path):
    class Slow(nn.Linear):
        def forward(self, x):
            x = slowly(x)  # as a long forward pass
            return super().forward(x)

    data = torch.utils.data.TensorDataset(torch.ones(16, 3), torch.ones(16, 1))
    config = TrainingConfig(num_epochs=1, batch_size=16, run={"dir": str(tmp_path / "run"), "quiet": True})
    Trainer(Slow(3, 1), data, None, config, loss=nn.MSELoss()).train()
    told = " | ".join(caplog.messages)
    assert re.search(r"Slow is captured, \d+ s so far, now at \S+  time\.sleep\(1\.0\)", told)
    assert "the training step is compiled, " in capsys.readouterr().err  # a run has its own handlers
