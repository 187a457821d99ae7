"""What no graph can hold is refused before a long capture, after one call in torch."""

import functools

import numpy as np
import pytest
import scipy.optimize
import torch
from scipy.optimize import linear_sum_assignment
from torch import nn

import jaxtrain
from jaxtrain import Trainer, TrainingConfig
from jaxtrain.errors import UserError
from torch_bridge.lowering import foreseen


@torch.library.custom_op("foreseen::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda context, grad: grad * 2)


def matched(scores):
    rows, columns = linear_sum_assignment(scores.detach().numpy(), maximize=True)
    return scores[rows, columns].sum()


class Matcher:
    def __call__(self, scores):
        return matched(scores)


class Matching(nn.Module):
    @torch.no_grad()
    def forward(self, scores):
        return scipy.optimize.linear_sum_assignment(scores)


class Net(nn.Module):
    """As many parts as a detector has, and a head of the test's own."""

    def __init__(self, head):
        super().__init__()
        self.parts = nn.Sequential(*[nn.Identity() for _ in range(foreseen.MANY)])
        self.first, self.head = nn.Linear(4, 4), head

    def forward(self, x, target=None):
        scores = self.first(self.parts(x))
        loss = self.head(scores)
        return {"loss": loss} if target is not None else scores


def sum_of_matching(scores):
    rows, columns = Matching()(scores)
    return scores[rows, columns].sum()


def sum_of_twice(scores):
    return torch.ops.foreseen.twice(scores).sum()


HEADS = {
    "a function of scipy's": matched,
    "one in a module of scipy's, without gradients": sum_of_matching,
    "an object": Matcher(),
    "a partial": functools.partial(matched),
    "a lambda": lambda scores: matched(scores),
    "an operator without a lowering": sum_of_twice,
}
PLAIN = {
    "torch": lambda scores: scores.sum(),
    "numpy": lambda scores: scores.sum() + float(np.sqrt(4.0)),
    "a branch": lambda scores: matched(scores) if scores.shape[0] > 100 else scores.sum(),
}


def losses(head, step_of):
    torch.manual_seed(0)
    net = Net(head)
    step = step_of(net, torch.optim.SGD(net.parameters(), 0.01))
    draw = torch.Generator().manual_seed(1)
    return step, [float(step(torch.randn(4, 4, generator=draw))) for _ in range(4)]


def loss_of(net, x):
    return net(x, 1)["loss"]


def in_torch(net, optimizer):
    def step(x):
        optimizer.zero_grad()
        loss = loss_of(net, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def compiled(net, optimizer):
    return jaxtrain.compile(net, loss_of, optimizer)


@pytest.mark.parametrize("name", HEADS)
def test_code_that_reaches_other_libraries_is_read_without_calling_it(name):
    net = Net(HEADS[name])
    assert foreseen.reached([], net.modules())
    assert foreseen.reached([HEADS[name]], [])


@pytest.mark.parametrize("kind", ["Transformer", "LSTM", "MultiheadAttention"])
def test_layers_of_torchs_reach_no_other_library(kind):
    layer = getattr(nn, kind)(8, *([1] if kind != "Transformer" else []))
    assert not foreseen.reached([torch.nn.functional.cross_entropy], layer.modules())


@pytest.mark.parametrize("name", ["a function of scipy's", "an object", "an operator without a lowering"])
def test_what_no_graph_holds_is_known_after_one_step_in_torch(name):
    step, found = losses(HEADS[name], compiled)
    assert found == pytest.approx(losses(HEADS[name], in_torch)[1], rel=1e-6)
    assert not step.capture.graphs
    said = "foreseen.twice" if "operator" in name else "scipy's linear_sum_assignment"
    assert said in step.explain()
    assert "test_foreseen.py:" in step.explain()


@pytest.mark.parametrize("name", ["a branch"])
def test_code_that_is_not_called_is_captured_from_the_second_step_on(name):
    step, found = losses(PLAIN[name], compiled)
    wanted = losses(PLAIN[name], in_torch)[1]
    assert found == pytest.approx(wanted, rel=1e-6, abs=1e-6)  # sums of numbers around 3 that may cancel
    assert len(step.capture.graphs) == 1
    assert step.torch is None


@pytest.mark.parametrize("name", ["a function of scipy's", "an operator without a lowering"])
def test_a_trainer_refuses_it_before_it_records(name, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.export, "export", lambda *_, **__: pytest.fail("it was recorded first"))
    data = torch.utils.data.TensorDataset(torch.randn(8, 4))
    config = TrainingConfig(max_steps=1, batch_size=4, output_dir=str(tmp_path))
    with pytest.raises(UserError, match="linear_sum_assignment|foreseen.twice") as error:
        Trainer(Net(HEADS[name]), data, None, config, loss=lambda output, batch: HEADS[name](output))
    assert "test_foreseen.py:" in str(error.value)
