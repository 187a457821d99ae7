"""BatchNorm in a loop's loss: evaluated and trained before one backward pass, and in a twin that follows it."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import jaxtrain
from tests.e2e.loops import assert_same, batches, check, net, pair, sgd, torch_step


def normalised():
    return net(nn.BatchNorm1d(8))


def both_modes(evaluated_first: bool, graded: bool = True):
    def loss(module, batch):
        module.train(not evaluated_first)
        with torch.set_grad_enabled(graded or not evaluated_first):
            first = module(batch[0])
        module.train(evaluated_first)
        with torch.set_grad_enabled(graded or evaluated_first):
            second = module(batch[0] * 1.5)
        module.train()
        return (first - second).square().mean() + F.mse_loss(second if evaluated_first else first, batch[1])

    return loss


def test_evaluation_before_training_in_one_loss_has_torchs_gradients(caplog):
    """torch's backward pass of the evaluation reads the statistics that training has written since."""
    check(*pair(normalised, sgd), both_modes(True))
    assert "in eval() and then in train() before one backward pass" in caplog.text


@pytest.mark.parametrize(("evaluated_first", "graded"), [(False, True), (True, False), (False, False)])
def test_other_orders_stay_one_program(evaluated_first, graded, caplog):
    check(*pair(normalised, sgd), both_modes(evaluated_first, graded))
    assert not [record for record in caplog.records if record.name.startswith(("jaxtrain", "torch_bridge"))]


class Twins(nn.Module):
    """BYOL's pair: the twin's buffers, its count of batches among them, follow by an average in the forward."""

    def __init__(self):
        super().__init__()
        self.net = normalised()
        self.twin = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for ours, theirs in zip(self.net.buffers(), self.twin.buffers(), strict=True):
                theirs.copy_(theirs * 0.5 + ours * 0.5)
        return F.mse_loss(self.net(x), self.twin(x * 1.1).detach())


def test_a_twins_count_of_batches_may_be_an_average():
    theirs, ours = Twins(), Twins()
    step = jaxtrain.compile(ours, lambda module, batch: module(batch[0]), sgd(ours))
    plain = torch_step(theirs, sgd(theirs), lambda module, batch: module(batch[0]))
    for batch in batches(6):
        assert float(step(batch)) == pytest.approx(plain(batch), rel=1e-4, abs=1e-6)
    step.sync()
    assert_same(theirs, ours)


def test_a_teacher_that_is_called_twice_without_gradients_counts_in_the_program():
    """Its second call writes counters of batches, which have no gradient to keep."""

    def loss(module, batch):
        with torch.no_grad():
            first, second = module["teacher"](batch[0]), module["teacher"](-batch[0])
        return (module["net"](batch[0]) - first - second).square().mean()

    build = lambda: nn.ModuleDict({"net": normalised(), "teacher": normalised().requires_grad_(False)})
    pairs = pair(build, lambda module: sgd(module["net"]))
    check(*pairs, loss)
    step = jaxtrain.compile(pairs[1][0], loss, pairs[1][1])
    step(batches()[0])
    assert step.torch is None
