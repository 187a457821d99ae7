"""An operator whose lowering fails is named with its line; a loop of one's own goes on in torch."""

import pytest
import torch
from torch import nn

import jaxtrain
from jaxtrain import Trainer, TrainingConfig
from jaxtrain.errors import UserError
from tests.e2e.loops import assert_same, batches, check, net, pair
from torch_bridge.lowering import TABLE, register

OPERATOR = "aten.sinc.default"


@pytest.fixture(autouse=True)
def failing(monkeypatch):
    before = TABLE.get(OPERATOR)

    def fail(call, x):
        raise IndexError("axis 0 is out of bounds")

    register(OPERATOR, fail)
    yield
    TABLE.pop(OPERATOR)
    if before is not None:
        TABLE[OPERATOR] = before


def loss(module, batch):
    return torch.sinc(module(batch[0]) - batch[1]).mean()


def test_the_trainer_names_operator_error_and_line(tmp_path):
    rows = torch.utils.data.TensorDataset(*(torch.cat(columns) for columns in zip(*batches(2), strict=True)))
    config = TrainingConfig(run={"dir": str(tmp_path / "run"), "quiet": True}, data={"batch_size": 8})
    sentence = r"aten\.sinc\.default fails in JAX \(IndexError: axis 0 .*test_failing_lowering"
    with pytest.raises(UserError, match=sentence):
        Trainer(net(), rows, None, config, loss=lambda out, batch: torch.sinc(out - batch[1]).mean()).train()


def test_a_compiled_step_goes_on_in_torch_with_torchs_weights():
    (theirs, their_optimizer), (ours, optimizer) = pair()
    check((theirs, their_optimizer), (ours, optimizer), loss)


def test_a_compiled_forward_goes_on_in_torch():
    class Sinc(nn.Module):
        def forward(self, x):
            return torch.sinc(x)

    theirs, ours = net(Sinc()), net(Sinc())
    step = jaxtrain.compile(ours, lambda m, b: m(b[0]).square().mean(), torch.optim.SGD(ours.parameters(), 0.1))
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1)
    for batch in batches():
        optimizer.zero_grad()
        theirs(batch[0]).square().mean().backward()
        optimizer.step()
        step(batch)
    step.sync()
    assert_same(theirs, ours)
