"""torch.autograd.grad inside a loss: its options, in one program with the step."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import jaxtrain
from torch_bridge.capture.module_call import compile_calls


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def rows_at_once(module, x):
    y = module(x)
    rows = torch.eye(3)[:, None, :].expand(3, *y.shape)
    (jacobian,) = torch.autograd.grad(y, x, rows, create_graph=True, is_grads_batched=True)
    return jacobian.pow(2).mean() + y.mean()


def none_for_what_is_unused(module, x):
    other = torch.zeros(8, requires_grad=True)
    slope, none = torch.autograd.grad(module(x).sum(), (x, other), create_graph=True, allow_unused=True)
    return slope.pow(2).mean() * (1 if none is None else 5)


def none_behind_a_detach(module, x):
    (none,) = torch.autograd.grad(module(x.detach()).sum(), x, allow_unused=True)
    return module(x).pow(2).mean() * (1 if none is None else 5)


def zeros_on_request(module, x):
    other = torch.zeros(8, requires_grad=True)
    slopes = torch.autograd.grad(module(x).sum(), (x, other), create_graph=True, materialize_grads=True)
    return sum(slope.pow(2).mean() for slope in slopes)


def written_into_another(module, x):
    y = torch.zeros(8, 6)
    y[:, :3] = x[:, 3:]
    (slope,) = torch.autograd.grad(module(y).sum(), x, create_graph=True, allow_unused=True)
    return slope.pow(2).mean()


def losses(step, batches):
    return [float(step(batch)) for batch in batches]


def torch_step(module, loss):
    optimizer = torch.optim.SGD(module.parameters(), 0.1)

    def step(batch):
        optimizer.zero_grad()
        value = loss(module, batch)
        value.backward()
        optimizer.step()
        return value

    return step


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 6, generator=generator) for _ in range(3)]


COMPILED = [rows_at_once, none_behind_a_detach, written_into_another]
IN_TORCH = [none_for_what_is_unused, zeros_on_request]  # torch.zeros(requires_grad=True) is not captured


@pytest.mark.parametrize("asks", [*COMPILED, *IN_TORCH])
def test_a_loss_that_asks_for_gradients_has_torchs_losses(asks):
    loss = lambda module, x: asks(module, x.requires_grad_(True))
    theirs = losses(torch_step(net(), loss), batches())
    module = net()
    step = jaxtrain.compile(module, loss, torch.optim.SGD(module.parameters(), 0.1))
    assert losses(step, batches()) == pytest.approx(theirs, rel=1e-5)
    assert (step.torch is None) == (asks in COMPILED)


def test_a_module_runs_in_torch_where_it_is_differentiated_forward():
    def loss(module, x):
        with forward_ad.dual_level():
            y, slope = forward_ad.unpack_dual(module(forward_ad.make_dual(x, torch.ones_like(x))))
        return y.pow(2).mean() + slope.pow(2).mean()

    theirs = losses(torch_step(net(), loss), batches())
    module = net()
    step = jaxtrain.compile(module, loss, torch.optim.SGD(module.parameters(), 0.1))
    assert losses(step, batches()) == pytest.approx(theirs, rel=1e-5)


def test_rows_that_torch_asks_of_a_compiled_module_are_torchs():
    x = torch.ones(8, 6, requires_grad=True)
    module, slopes = net(), torch.eye(8)[:2].unsqueeze(-1)
    (want,) = torch.autograd.grad(module(x)[:, :1], x, slopes, is_grads_batched=True)
    compile_calls([module])
    (got,) = torch.autograd.grad(module(x)[:, :1], x, slopes, is_grads_batched=True)
    torch.testing.assert_close(got, want)
