"""Attributes that code has set on tensors are there in a recorded call: marks of parameters (`p.decay = True`)."""

import pytest
import torch
from torch import nn

import jaxtrain
from tests.e2e.loops import torch_step

KEPT = torch.ones(3)


class Marked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.layer.weight.decay, self.layer.weight.factor = True, 2.0
        self.register_buffer("mask", torch.ones(2))
        self.mask.factor = 3.0

    def forward(self, x):
        factor = getattr(self.layer.weight, "factor", 1.0) * getattr(self.mask, "factor", 1.0)
        return self.layer(x) * self.mask * factor


def penalised(module, batch):
    marked = [p for p in module.parameters() if getattr(p, "decay", False)]
    return module(batch).mean() + sum(p.square().sum() for p in marked)


def trained(loss, ours):
    torch.manual_seed(0)
    vars(KEPT).clear()
    module = Marked()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    step = jaxtrain.compile(module, loss, optimizer) if ours else torch_step(module, optimizer, loss)
    return [float(step(torch.ones(4, 3))) for _ in range(4)], module, step


def test_marks_of_parameters_and_buffers_choose_as_in_torch():
    theirs, _, _ = trained(penalised, ours=False)
    losses, _, step = trained(penalised, ours=True)
    assert losses == pytest.approx(theirs, rel=1e-5)
    assert step.torch is None


def test_a_prepared_module_sees_the_marks_of_its_parameters():
    Accelerator = pytest.importorskip("jaxtrain.accelerate", exc_type=ImportError).Accelerator
    module = Marked()
    x = torch.ones(4, 3)
    expected = module(x).detach()
    prepared = Accelerator(cpu=True).prepare(module)
    torch.testing.assert_close(prepared(x).detach(), expected)


def counts_on_a_parameter(module, batch):
    weight = module.layer.weight
    weight.calls = getattr(weight, "calls", 0) + 1
    return module(batch).mean() * weight.calls


def counts_on_another_tensor(module, batch):
    KEPT.calls = getattr(KEPT, "calls", 0) + 1
    return module(batch).mean() * KEPT.sum() * KEPT.calls


@pytest.mark.parametrize("loss", [counts_on_a_parameter, counts_on_another_tensor])
def test_an_attribute_that_the_loss_sets_on_a_tensor_is_as_in_torch(loss):
    theirs, _, _ = trained(loss, ours=False)
    losses, module, _ = trained(loss, ours=True)
    assert losses == pytest.approx(theirs, rel=1e-5)
    assert (KEPT if loss is counts_on_another_tensor else module.layer.weight).calls == 4


def test_an_attribute_of_the_batch_is_read_at_each_call():
    module = Marked()
    loss = lambda module, batch: module(batch).mean() * getattr(batch, "scale", 1.0)
    step = jaxtrain.compile(module, loss, torch.optim.SGD(module.parameters(), lr=0.0))
    for scale in (4.0, 4.0, 5.0, None, torch.tensor(7.0)):
        batch = torch.ones(4, 3)
        if scale is not None:
            batch.scale = scale
        assert float(step(batch)) == pytest.approx(float(loss(module, batch).detach()), rel=1e-6)
    assert step.torch is None
