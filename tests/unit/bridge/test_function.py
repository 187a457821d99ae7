"""JAX functions in torch's hands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxtrain import UserError
from torch_bridge.function import as_torch


@as_torch
def smooth(prediction, target, mask=None, *, scale=1.0):
    """Several results, nested, one of them an integer."""
    square = scale * jnp.square(prediction - target)
    square = square if mask is None else jnp.where(mask, square, 0)
    return {"loss": square.mean(), "parts": (square.sum(1), (square > 0).sum())}


def inputs(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(3, 4, dtype=dtype, requires_grad=True), torch.randn(3, 4, dtype=dtype)


def test_values_and_gradients_are_those_of_torchs_own_arithmetic():
    prediction, target = inputs()
    found = smooth(prediction, target, scale=3.0)
    wanted = 3.0 * (prediction - target).square()
    torch.testing.assert_close(found["loss"], wanted.mean())
    torch.testing.assert_close(found["parts"][0], wanted.sum(1))
    (got,) = torch.autograd.grad(found["loss"] + 2 * found["parts"][0][1], prediction)
    (expected,) = torch.autograd.grad(wanted.mean() + 2 * wanted.sum(1)[1], prediction)
    torch.testing.assert_close(got, expected)
    assert not found["parts"][1].requires_grad
    assert found["parts"][1].dtype is torch.int64


def test_arrays_give_arrays():
    found = smooth(jnp.ones((2, 2)), jnp.zeros((2, 2)))
    assert isinstance(found["loss"], jax.Array)
    assert float(found["loss"]) == 1


def test_float64_is_computed_in_float64_and_bfloat16_stays():
    prediction, target = inputs(torch.float64)
    loss = smooth(prediction, target)["loss"]
    loss.backward()
    assert loss.dtype is prediction.grad.dtype is torch.float64
    np.testing.assert_allclose(loss.item(), (prediction - target).square().mean().item(), rtol=1e-14)
    half = smooth(*(x.detach().bfloat16() for x in (prediction, target)))["loss"]
    assert half.dtype is torch.bfloat16
    assert not half.requires_grad


def test_a_mask_gets_no_gradient_and_no_grad_records_nothing():
    prediction, target = inputs()
    mask = torch.tensor([[True], [False], [True]])
    smooth(prediction, target, mask)["loss"].backward()
    assert not prediction.grad[1].any()
    assert prediction.grad[0].all()
    with torch.no_grad():
        assert not smooth(prediction, target)["loss"].requires_grad


def test_an_input_changed_before_backward_leaves_the_gradient_of_the_call():
    prediction, target = inputs()
    before = target.clone()
    loss = as_torch(lambda a, b: (a * b).sum())(prediction, target)
    target += 1
    loss.backward()
    assert torch.equal(prediction.grad, before)


def test_an_argument_that_nothing_can_be_compiled_for_is_named():
    prediction, target = inputs()
    with pytest.raises(UserError, match="an argument is set"):
        smooth(prediction, target, scale={1.0})


def test_a_parameter_that_torch_changes_in_place_or_replaces_is_seen():
    module = torch.nn.Linear(3, 2)
    call = as_torch(lambda weight, x: x @ weight.T)
    x = torch.ones(1, 3)
    for change in (
        lambda: None,
        lambda: module.weight.data.mul_(2),
        lambda: setattr(module.weight, "data", torch.ones(2, 3)),
    ):
        change()
        torch.testing.assert_close(call(module.weight, x), x @ module.weight.T)
    module.weight = torch.nn.Parameter(torch.zeros(2, 3))
    torch.testing.assert_close(call(module.weight, x), torch.zeros(1, 2))
