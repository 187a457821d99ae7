"""Gradients of gradients go through the backward that an autograd.Function or a hook gives, as in torch."""

import pytest
import torch
from torch import nn

import jaxtrain
from jaxtrain import UserError


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.exp(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, slope):
        (y,) = ctx.saved_tensors
        return slope * y


class Once(Exponential):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, slope):
        return slope * ctx.saved_tensors[0]


def hooked(x):
    x = 2 * x
    x.register_hook(lambda slope: slope / 2)
    return torch.tanh(x)


def hooked_after(x):
    x = torch.tanh(x)
    x.register_hook(lambda slope: slope / 2)
    return x**2


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.layer = function, nn.Linear(3, 3)

    def forward(self, x):
        return torch.tanh(self.function(self.layer(x)))


def penalty(module, x):
    x = x.clone().requires_grad_()
    y = module(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return slope.pow(2).sum() + y.pow(2).mean()


def trained(function, compiled: bool) -> torch.Tensor:
    module = Net(function)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    x = torch.linspace(-1, 1, 6).reshape(2, 3)
    if compiled:
        step = jaxtrain.compile(module, penalty, optimizer)
        for _ in range(2):
            step(x)
        step.sync()
        assert (step.torch is None) == (function != Exponential.apply)
    else:
        for _ in range(2):
            optimizer.zero_grad()
            penalty(module, x).backward()
            optimizer.step()
    return module.layer.weight.detach()


@pytest.mark.parametrize(
    "function", [Exponential.apply, hooked, hooked_after], ids=["function", "hook", "hook on a result"]
)
def test_a_gradient_penalty_is_torchs(function):
    torch.testing.assert_close(trained(function, True), trained(function, False), rtol=1e-5, atol=1e-6)


def test_what_torch_cannot_differentiate_twice_is_refused():
    with pytest.raises((UserError, RuntimeError), match="twice|again"):
        trained(Once.apply, True)


@pytest.mark.parametrize("of", [lambda y: 7 % y, lambda y: torch.linalg.qr(y, mode="r").R], ids=["remainder", "R"])
def test_a_gradient_that_torch_has_not_is_refused(of):
    module = nn.Linear(3, 1)
    step = jaxtrain.compile(module, lambda m, x: of(m(x)).sum(), torch.optim.SGD(module.parameters(), 0.1))
    with pytest.raises((UserError, RuntimeError), match="no derivative|not implemented|mode='r'"):
        step(torch.ones(2, 3))
