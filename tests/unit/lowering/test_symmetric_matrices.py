"""Operators that read one triangle of a matrix have torch's gradient, also where the matrix is itself a parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from torch_bridge.from_torch import from_torch

WEIGHTS = torch.randn(4, 4, generator=torch.manual_seed(1))
LINEAR = torch.linalg


def _log_probability(x):
    return torch.distributions.MultivariateNormal(WEIGHTS[0], x, validate_args=False).log_prob(WEIGHTS[1])


def _root(x):
    values, vectors = LINEAR.eigh(x)
    return vectors @ torch.diag(values.clamp_min(1e-3).sqrt()) @ vectors.mT


FUNCTIONS = {
    "cholesky": lambda x: LINEAR.cholesky(x),
    "upper cholesky": lambda x: LINEAR.cholesky(x, upper=True),
    "cholesky_ex": lambda x: LINEAR.cholesky_ex(x)[0],
    "inverse": lambda x: torch.cholesky_inverse(LINEAR.cholesky(x)),
    "solution with a factor of its own": lambda x: torch.cholesky_solve(WEIGHTS, x),
    "eigenvectors": lambda x: LINEAR.eigh(x)[1].abs(),
    "eigenvectors of the upper triangle": lambda x: LINEAR.eigh(x, UPLO="U")[1].abs(),
    "square root": _root,
    "normal distribution": _log_probability,
}


class Apply(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return (self.function(x) * WEIGHTS).sum()


@pytest.mark.parametrize("skew", [0.0, 0.3], ids=["symmetric", "not symmetric"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_gradient_of_every_element_is_torchs(name, skew):
    draw = torch.manual_seed(0)
    root = torch.randn(4, 4, generator=draw)
    x = root @ root.mT + torch.diag(torch.arange(4.0, 8)) + skew * torch.randn(4, 4, generator=draw)
    x.requires_grad_()
    module = Apply(FUNCTIONS[name]).eval()
    wanted = module(x)
    wanted.backward()
    converted = from_torch(module, (x.detach(),), modes=("evaluation",))
    value, gradient = jax.value_and_grad(lambda x: converted(x))(jnp.asarray(x.detach().numpy()))
    np.testing.assert_allclose(value, wanted.item(), rtol=1e-4)
    np.testing.assert_allclose(gradient, x.grad, rtol=1e-3, atol=1e-4)
