"""Python beside the tensors: counters, hooks, spies and patches are called as often as torch would call them."""

from unittest import mock

import pytest
import torch
from torch import nn

import jaxtrain
from jaxtrain import Trainer, TrainingConfig
from jaxtrain.compiled_step.or_torch import StepOrTorch
from tests.e2e.loops import assert_same, batches, mse, net

DATA = batches(4)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.linear, self.calls = nn.Linear(6, 1), 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x)


def compiled(module):
    return jaxtrain.compile(module, mse, torch.optim.SGD(module.parameters(), 0.05))


def in_torch(module):
    optimizer = torch.optim.SGD(module.parameters(), 0.05)
    for batch in DATA:
        optimizer.zero_grad()
        mse(module, batch).backward()
        optimizer.step()
    return module


def test_an_evaluation_that_counts_counts():
    module = Counts()
    forward = compiled(module).eval()
    outputs = [forward(x) for x, _ in DATA]
    assert module.calls == 4
    assert module.training
    torch.testing.assert_close(outputs[3], module(DATA[3][0]).detach())


def test_a_hook_that_collects_collects_in_training_and_evaluation():
    module, seen = net(), []
    step = compiled(module)
    forward = step.eval()
    forward(DATA[0][0])
    module[0].register_forward_hook(lambda *_: seen.append(1))
    for batch in DATA:
        step(batch)
    assert len(seen) == 4
    for x, _ in DATA:
        forward(x)
    assert len(seen) == 8
    step.sync()
    assert_same(in_torch(net()), module)


def test_a_hook_registered_after_eval_changes_its_outputs():
    module = net()
    forward = compiled(module).eval()
    before = forward(DATA[0][0])
    module[0].register_forward_hook(lambda module, inputs, output: output + 1)
    with torch.no_grad():
        torch.testing.assert_close(forward(DATA[0][0]), module(DATA[0][0]))
    assert (forward(DATA[0][0]) - before).abs().max() > 0.01


@pytest.mark.parametrize("late", [False, True])
def test_a_step_that_was_put_on_the_optimizer_is_called(late):
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), 0.05)
    own, calls = optimizer.step, []

    def count(*args, **kwargs):
        calls.append(1)
        return own(*args, **kwargs)

    step = None
    if late:
        step = jaxtrain.compile(module, mse, optimizer)
        step(DATA[0])
    optimizer.step = count
    step = step or jaxtrain.compile(module, mse, optimizer)
    for batch in DATA[late:]:
        step(batch)
    step.sync()
    assert len(calls) == 4 - late
    assert_same(in_torch(net()), module)


@pytest.mark.parametrize("moment", ["pre", "post"])
def test_hooks_of_an_optimizers_step_are_called(moment):
    module, calls = net(), []
    optimizer = torch.optim.SGD(module.parameters(), 0.05)
    getattr(optimizer, f"register_step_{moment}_hook")(lambda *_: calls.append(1))
    step = jaxtrain.compile(module, mse, optimizer)
    for batch in DATA:
        step(batch)
    step.sync()
    assert len(calls) == 4
    assert_same(in_torch(net()), module)


@pytest.mark.parametrize("spied", ["object", "class"])
def test_a_spied_forward_is_called_once_a_step(spied):
    module = net()
    step = compiled(module)
    step(DATA[0])
    options = {"wraps": module.forward} if spied == "object" else {"autospec": True, "side_effect": nn.Tanh.forward}
    with mock.patch.object(module if spied == "object" else nn.Tanh, "forward", **options) as spy:
        for batch in DATA[1:]:
            step(batch)
    assert spy.call_count == 3
    step.sync()
    assert_same(in_torch(net()), module)


def test_a_forward_that_a_class_gets_later_counts(monkeypatch):
    """As a cell of a notebook gives it one, that runs again."""
    module = Counts()
    step = jaxtrain.compile(module, mse, torch.optim.SGD(module.parameters(), 0.05))
    monkeypatch.setattr(Counts, "forward", lambda self, x: self.linear(x) + 1)
    first = float(step(DATA[0]))
    monkeypatch.setattr(Counts, "forward", lambda self, x: self.linear(x) + 100)
    assert float(step(DATA[0])) > 50 * first


def test_a_trainers_step_of_own_objects_counts_compiled():
    module, lines = Counts(), []
    step = StepOrTorch(module, mse, torch.optim.SGD(module.parameters(), 0.05), say=lines.append)
    for batch in DATA:
        step(batch)
    assert module.calls == 4
    assert lines == []


def test_a_trainer_says_what_a_compiled_run_does_not_change(tmp_path, caplog):
    module, seen = net(), []
    module[0].register_forward_hook(lambda *_: seen.append(1))
    dataset = torch.utils.data.TensorDataset(*(torch.cat(parts) for parts in zip(*DATA, strict=True)))
    config = TrainingConfig(train={"steps": 2}, data={"batch_size": 8}, run={"dir": tmp_path})
    Trainer(module, dataset, None, config, loss=nn.MSELoss())
    assert seen == []
    assert "Sequential changes seen in Python, which a compiled run does not" in caplog.text


class Branches(torch.nn.Linear):
    """A branch on values."""

    def forward(self, x):
        y = super().forward(x)
        return y * 2 if float(y.max()) > 0 else y


class Gives(torch.nn.Linear):
    """A distribution."""

    def forward(self, x):
        return torch.distributions.Normal(super().forward(x), 1.0)


class Packs(torch.nn.GRU):
    def forward(self, x):
        return super().forward(x)[1]


def _packed():
    return torch.nn.utils.rnn.pack_sequence([torch.ones(length, 6) for length in (3, 2)])


@pytest.mark.parametrize(
    ("module", "inputs", "of"),
    [
        (lambda: Branches(6, 2), lambda: torch.ones(4, 6), lambda y: y),
        (lambda: Gives(6, 2), lambda: torch.ones(4, 6), lambda y: y.mean),
        (lambda: Packs(6, 2), _packed, lambda y: y),
    ],
)
def test_an_evaluation_that_is_no_single_program_is_torchs(module, inputs, of):
    """A branch on values, an object that is returned, a packed sequence: three calls give torch's numbers."""
    torch.manual_seed(0)
    module = module()
    step = jaxtrain.compile(module, lambda m, b: of(m(b)).square().mean(), torch.optim.SGD(module.parameters(), 0.1))
    evaluate = step.eval()
    for _ in range(3):
        step(inputs())
        found = of(evaluate(inputs()))
        step.sync()
        with torch.no_grad():
            torch.testing.assert_close(found, of(module(inputs())), rtol=1e-5, atol=1e-6)


def test_an_evaluation_that_torch_cannot_run_raises_torchs_error():
    module = torch.nn.Linear(6, 2)
    evaluate = compiled(module).eval()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        evaluate(torch.ones(4, 5))
    assert evaluate(torch.ones(4, 6)).shape == (4, 2)


def test_an_evaluation_that_keeps_a_mask_with_its_size_is_torchs():
    class Masked(torch.nn.Linear):
        size = 0

        def forward(self, x):
            if self.size != len(x):
                self.size, self.mask = len(x), torch.ones(len(x), len(x)).tril()
            return super().forward(self.mask @ x)

    module = Masked(6, 1)
    evaluate = compiled(module).eval()
    for rows in (4, 4, 5, 5, 4):
        torch.testing.assert_close(evaluate(torch.ones(rows, 6)), module(torch.ones(rows, 6)).detach())
