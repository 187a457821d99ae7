"""Second derivatives through attention, which torch's fused kernels do not have."""

import jax
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import jaxtrain
from torch_bridge import from_torch


class Critic(nn.Module):
    """One attention layer, and a score for each sample."""

    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.Linear(8, 24), nn.Linear(8, 1)

    def forward(self, x):
        q, k, v = self.attention(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.head(mixed.transpose(1, 2).flatten(2)).mean(1)


def penalty(critic, x):
    """The gradient penalty of a WGAN. Source: Gulrajani et al. 2017."""
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return (slope.flatten(1).norm(dim=1) - 1).square().mean()


@pytest.fixture
def critic():
    torch.manual_seed(0)
    return Critic()


def test_a_gradient_penalty_through_fused_attention_trains_where_torch_refuses(critic):
    x = torch.randn(4, 6, 8)
    with pytest.raises(RuntimeError, match="is not implemented"):
        penalty(critic, x).backward()
    critic.zero_grad()
    with sdpa_kernel(SDPBackend.MATH):  # the formula, which torch can derive twice
        loss = penalty(critic, x)
        loss.backward()
    wanted = {name: p.detach() - p.grad for name, p in critic.named_parameters() if p.grad is not None}
    step = jaxtrain.compile(critic, penalty, torch.optim.SGD(critic.parameters(), lr=1.0))
    assert float(step(x)) == pytest.approx(float(loss), rel=1e-6)
    step.sync()
    for name, value in wanted.items():
        assert torch.allclose(critic.get_parameter(name), value, rtol=1e-5, atol=1e-6), name


def test_a_hessian_vector_product_through_attention_is_torchs(critic):
    x, direction = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    with sdpa_kernel(SDPBackend.MATH):
        _, wanted = torch.autograd.functional.hvp(lambda x: critic(x).square().sum(), x, direction)
    model = from_torch(critic.eval(), x)
    slope = jax.grad(lambda x: (model(x) ** 2).sum())
    _, product = jax.jvp(slope, (x.numpy(),), (direction.numpy(),))
    assert abs(product - wanted.numpy()).max() < 1e-5 * abs(wanted.numpy()).max()
