"""Warnings that a model or a loss gives reach the user once each, with the user's line."""

import inspect
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import jaxtrain
from jaxtrain import Trainer, TrainingConfig
from torch_bridge.capture.module_call import compile_calls

X, Y = torch.randn(8, 3), torch.randn(8)


def mean_squares(module, batch):
    return F.mse_loss(module(batch[0]), batch[1])


def mean_squares_of(output, target):
    return F.mse_loss(output, target)


class Warns(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x):
        warnings.warn("the model is not calibrated", stacklevel=1)
        warnings.warn("an old option", FutureWarning, stacklevel=2)
        return self.linear(x)


def steps(module, loss_fn, batches):
    """Return the warnings of the user's in the calls of a compiled step: (category, text, line)."""
    step = jaxtrain.compile(module, loss_fn, torch.optim.SGD(module.parameters(), 0.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches:
            step(batch)
    return [(one.category, str(one.message), one.lineno) for one in caught if one.filename == __file__]


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return first + next(place for place, line in enumerate(lines) if text in line)


def test_the_target_size_is_told_once_with_its_line_and_real_sizes():
    told = steps(nn.Linear(3, 1), mean_squares, [(X, Y)] * 3)
    assert [one[0] for one in told] == [UserWarning]
    assert "target size (torch.Size([8])) that is different to the input size (torch.Size([8, 1]))" in told[0][1]
    assert told[0][2] == line_of(mean_squares, "mse_loss")


def test_a_module_of_torch_tells_the_line_that_calls_it():
    criterion = nn.L1Loss()

    def loss_fn(module, batch):
        return criterion(module(batch[0]), batch[1])

    told = steps(nn.Linear(3, 1), loss_fn, [(X, Y)] * 2)
    assert [one[2] for one in told] == [line_of(loss_fn, "criterion(module")]


@pytest.mark.parametrize("loss", [nn.MSELoss(), mean_squares_of])
def test_a_trainer_tells_the_target_size_once(loss, tmp_path):
    config = TrainingConfig(num_epochs=1, batch_size=8, run={"dir": str(tmp_path / "run"), "quiet": True})
    data = TensorDataset(torch.randn(16, 3), torch.randn(16))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer(nn.Linear(3, 1), data, data, config, loss=loss).train()
    told = [one for one in caught if "target size" in str(one.message)]
    assert [one.category for one in told] == [UserWarning]
    assert "(torch.Size([8])) that is different to the input size (torch.Size([8, 1]))" in str(told[0].message)
    assert told[0].filename == __file__  # the loss's line, else that of the Trainer


def test_what_the_model_warns_of_itself_is_told_once():
    loss_fn = lambda module, batch: module(batch).pow(2).mean()
    told = steps(Warns(), loss_fn, [X, X, X[:5]])  # two shapes
    assert sorted(one[1] for one in told) == ["an old option", "the model is not calibrated"]
    assert {one[0] for one in told} == {UserWarning, FutureWarning}


def test_a_compiled_module_warns_as_often_as_in_torch():
    module = Warns()
    compile_calls([module])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module(X)
        module(X)
    assert len([one for one in caught if "calibrated" in str(one.message)]) == 2


def test_a_warning_that_the_user_makes_an_error_ends_the_step():
    module = Warns()
    step = jaxtrain.compile(module, lambda m, x: m(x).mean(), torch.optim.SGD(module.parameters(), 0.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(UserWarning, match="not calibrated"):
            step(X)


def test_what_the_user_filters_out_is_not_shown():
    module = Warns()
    step = jaxtrain.compile(module, lambda m, x: m(x).mean(), torch.optim.SGD(module.parameters(), 0.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        step(X)
    assert not caught
