"""A step that torch takes over where it cannot be compiled."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn

from jaxtrain.compiled_step.or_torch import StepOrTorch
from jaxtrain.errors import UserError


def loss_of(module, batch):
    loss = module(batch["x"]).square().mean()
    if len(batch["x"]) == 8:  # this shape only: a branch on a value, which no program can hold
        loss = loss if loss > 0 else -loss
    return loss, {"seen": loss}


def parts():
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    return module, torch.optim.AdamW(module.parameters(), lr=0.1)


def by_hand(module, optimizer, batches):
    losses = []
    for batch in batches:
        loss, _ = loss_of(module, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_torch_goes_on_where_the_program_stood():
    module, optimizer = parts()
    twin, other = copy.deepcopy(module), None
    other = torch.optim.AdamW(twin.parameters(), lr=0.1)
    batches = [{"x": torch.randn(rows, 3)} for rows in (16, 16, 8, 16)]
    said = []
    step = StepOrTorch(module, loss_of, optimizer, clip_norm=0.5, say=said.append)
    losses = []
    for number, batch in enumerate(batches):
        losses.append(float(step(batch)[0]))
        assert step.in_torch == (number >= 2)
    step.sync()
    assert losses == pytest.approx(by_hand(twin, other, batches), rel=1e-5)
    torch.testing.assert_close(module.state_dict(), twin.state_dict(), atol=1e-6, rtol=1e-5)
    assert optimizer.state[module.weight]["step"] == 4
    (line,) = said
    assert "training runs in torch, not compiled" in line
    assert "test_step_or_torch.py" in line
    torch.testing.assert_close(step.forward(batches[0]["x"]), module(batches[0]["x"]).detach())


def test_gradients_that_wait_on_the_device_are_not_lost_in_silence():
    module, optimizer = parts()
    step = StepOrTorch(module, loss_of, optimizer, say=lambda line: None)
    step({"x": torch.randn(16, 3)}, update=False)
    with pytest.raises(UserError, match="branch"):
        step({"x": torch.randn(8, 3)})
    step.drop_gradients()
    assert float(step({"x": torch.randn(8, 3)})[0]) > 0
    assert step.in_torch


def test_an_optimizer_without_a_counterpart_and_a_mock_step_in_torch():
    module, _ = parts()

    class Own(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.5})

        @torch.no_grad()
        def step(self):
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(0.5 * parameter.grad)

    said = []
    before = module.weight.detach().clone()
    step = StepOrTorch(module, loss_of, Own(module.parameters()), say=said.append)
    x = torch.randn(16, 3)
    gradient = torch.autograd.grad(module(x).square().mean(), module.weight)[0]
    step({"x": x})
    torch.testing.assert_close(module.weight.detach(), before - 0.5 * gradient)
    assert "Own has no counterpart" in said[0]
    optimizer = mock.MagicMock()
    StepOrTorch(module, loss_of, optimizer, say=said.append)({"x": x})
    assert (optimizer.step.call_count, len(said)) == (1, 1)


def test_a_criterion_whose_class_is_patched_is_called_at_every_step():
    module, optimizer = parts()
    criterion, own = nn.MSELoss(), nn.MSELoss.forward
    loss = lambda module, batch: criterion(module(batch["x"]), batch["y"])
    with mock.patch.object(nn.MSELoss, "forward", autospec=True, side_effect=own) as patched:
        step = StepOrTorch(module, loss, optimizer, say=print)
        for _ in range(3):
            step({"x": torch.randn(4, 3), "y": torch.randn(4, 2)})
    assert patched.call_count == 3


@pytest.mark.parametrize("name", ["clip_grad_norm_", "step"])
def test_what_is_patched_between_steps_is_called_from_then_on(name):
    module, optimizer = parts()
    said = []
    step = StepOrTorch(module, loss_of, optimizer, clip_norm=0.5, say=said.append)
    step({"x": torch.randn(4, 3)})
    step.sync()
    assert not step.in_torch
    owner = nn.utils if name == "clip_grad_norm_" else optimizer
    with mock.patch.object(owner, name) as patched:
        step({"x": torch.randn(4, 3)})
        step({"x": torch.randn(4, 3)})
    assert patched.call_count == 2
    assert len(said) == 1


def test_a_step_patched_on_torchs_class_is_called_at_every_step():
    module, optimizer = parts()
    own = torch.optim.AdamW.step
    with mock.patch.object(torch.optim.AdamW, "step", autospec=True, side_effect=own) as patched:
        step = StepOrTorch(module, loss_of, optimizer, say=print)
        for _ in range(2):
            step({"x": torch.randn(4, 3)})
    assert patched.call_count == 2
