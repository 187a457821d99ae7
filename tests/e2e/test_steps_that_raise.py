"""Where torch raises for some values, a compiled step does not count, and torch makes it: it raises, or goes on."""

import numpy as np
import pytest
import torch

import jaxtrain


class Weight(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(3))
        self.function = function

    def forward(self, x):
        return self.function(self.weight * x).sum()


def _with_jitter(x):
    try:
        return torch.linalg.cholesky(x)
    except torch.linalg.LinAlgError:
        return torch.linalg.cholesky(x + 2 * torch.eye(3))


def _asserted(x):
    value = x.sum().log()
    assert not torch.isnan(value)
    return value


RAISING = {
    "cholesky": torch.linalg.cholesky,
    "cross entropy": lambda x: torch.nn.functional.binary_cross_entropy(x.diagonal(), torch.ones(3)),
    "distribution": lambda x: torch.distributions.Normal(0.0, x.diagonal()).log_prob(torch.ones(3)),
    "negative scale": lambda x: torch.distributions.Normal(0.0, x.diagonal()).cdf(torch.ones(3)),
    "outside the support": lambda x: torch.distributions.Exponential(torch.ones(3)).log_prob(x.diagonal()),
    "inside another": lambda x: torch.distributions.Independent(
        torch.distributions.Exponential(torch.ones(3)), 1
    ).log_prob(x.diagonal()),
    "assertion": _asserted,
}
BATCHES = torch.tensor([1.0, 0.5, -1.0])


@pytest.fixture(autouse=True)
def validated():
    """torch.compile, in another test of this process, switches distributions' checks off for good."""
    before = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(True)
    yield
    torch.distributions.Distribution.set_default_validate_args(before)


def _step(module, compiled, **options):
    optimizer = torch.optim.SGD(module.parameters(), 0.001, momentum=0.9)
    loss = lambda module, x: module(x)
    if compiled:
        return jaxtrain.compile(module, loss, optimizer, **options)

    def step(x):
        optimizer.zero_grad()
        loss(module, x).backward()
        optimizer.step()

    return step


@pytest.mark.parametrize("name", RAISING)
def test_a_step_that_raises_in_torch_raises_and_changes_nothing(name):
    found = []
    for compiled in (False, True):
        module = Weight(RAISING[name])
        step = _step(module, compiled)
        step(BATCHES[0])
        with pytest.raises((RuntimeError, ValueError, AssertionError)) as error:
            step(BATCHES[2])
        found.append((type(error.value), str(error.value)[:40], module.weight.detach().numpy()))
    assert found[0][:2] == found[1][:2]
    np.testing.assert_allclose(found[1][2], found[0][2], rtol=1e-6)


def test_code_that_catches_the_error_goes_on_as_in_torch():
    found = []
    for compiled in (False, True):
        module = Weight(_with_jitter)
        step = _step(module, compiled)
        for x in BATCHES:
            step(x)
        if compiled:
            step.sync()
        found.append(module.weight.detach().numpy())
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-7)


def test_gradients_that_wait_stay_where_a_step_raises():
    module = Weight(torch.linalg.cholesky)
    step = _step(module, True)
    step(BATCHES[0], update=False)
    with pytest.raises(torch.linalg.LinAlgError):
        step(BATCHES[2], update=True)
    expected = torch.autograd.grad(module(BATCHES[0]), module.weight)[0]
    np.testing.assert_allclose(step.state_dict()["grads"]["weight"], expected, rtol=1e-6)


def test_a_forward_that_raises_inside_a_torch_loss_raises():
    module, seen = Weight(torch.linalg.cholesky), []
    optimizer = torch.optim.SGD(module.parameters(), 0.001)

    def loss(module, x):
        value = module(x)
        seen.append(value.item())
        return value

    step = jaxtrain.compile(module, loss, optimizer)
    step(BATCHES[0])
    with pytest.raises(torch.linalg.LinAlgError):
        step(BATCHES[2])
    assert len(seen) == 1
