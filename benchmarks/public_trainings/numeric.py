"""Equations, tables, recommendations: neural ODEs, physics, factorisation, Gaussian processes."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.public_trainings import Training, adam, one, training
from benchmarks.public_trainings.generative import mlp


class Dynamics(nn.Module):
    def __init__(self, wide: int = 2):
        super().__init__()
        self.net = mlp(wide, 16, wide, act=nn.Tanh)

    def forward(self, t, y):
        return self.net(y**3)


@training("neural ODE", "torchdiffeq, fixed steps (rk4)")
def ode() -> Training:
    from torchdiffeq import odeint

    times = torch.linspace(0, 1, 5)
    loss = lambda m, b: (odeint(m, b[0], times, method="rk4") - b[1]).abs().mean()
    return one(Dynamics(), loss, [(torch.randn(4, 2), torch.randn(5, 4, 2)) for _ in range(2)])


@training("neural ODE, adaptive", "torchdiffeq's dopri5: the number of steps depends on values")
def adaptive() -> Training:
    from torchdiffeq import odeint

    times = torch.linspace(0, 1, 3)
    loss = lambda m, b: (odeint(m, b[0], times, rtol=1e-3, atol=1e-4) - b[1]).abs().mean()
    return one(Dynamics(), loss, [(torch.randn(4, 2), torch.randn(3, 4, 2)) for _ in range(2)])


@training("physics-informed net", "second derivatives by the inputs: Burgers' equation")
def pinn() -> Training:
    def loss(m, batch):
        x, t, begin = (v.clone().requires_grad_(True) for v in batch)
        u = m(torch.cat([x, t], 1))
        u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
        (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
        start = m(torch.cat([begin, torch.zeros_like(begin)], 1))
        return ((u_t + u * u_x - 0.01 * u_xx) ** 2).mean() + F.mse_loss(start, -torch.sin(math.pi * begin))

    make = lambda: (torch.rand(12, 1) * 2 - 1, torch.rand(12, 1), torch.rand(12, 1) * 2 - 1)
    return one(mlp(2, 20, 20, 1, act=nn.Tanh), loss, [make() for _ in range(2)])


@training("Hamiltonian net", "vector field from the gradient of a scalar, torch.func")
def hamiltonian() -> Training:
    def loss(m, batch):
        x, wanted = batch
        slope = torch.func.vmap(torch.func.grad(lambda row: m(row).sum()))(x)
        return F.mse_loss(torch.stack([slope[:, 1], -slope[:, 0]], 1), wanted)

    return one(mlp(2, 24, 1, act=nn.Tanh), loss, [(torch.randn(8, 2), torch.randn(8, 2)) for _ in range(2)])


@training("matrix factorisation", "biases, Bayesian personalised ranking, Adagrad")
def factorisation() -> Training:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.user, self.item, self.bias = nn.Embedding(20, 8), nn.Embedding(30, 8), nn.Embedding(30, 1)

        def forward(self, user, item):
            return (self.user(user) * self.item(item)).sum(1) + self.bias(item).squeeze(1)

    module = Net()
    loss = lambda m, b: -F.logsigmoid(m(b[0], b[1]) - m(b[0], b[2])).mean()
    batches = [(torch.randint(0, 20, (16,)), *torch.randint(0, 30, (2, 16)).unbind()) for _ in range(2)]
    return one(module, loss, batches, torch.optim.Adagrad(module.parameters(), 0.05))


@training("DeepFM", "one embedding for all fields with offsets, squares of sums")
def deepfm() -> Training:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("offsets", torch.tensor([0, 10, 30]))
            self.factors, self.line, self.deep = nn.Embedding(60, 4), nn.Embedding(60, 1), mlp(12, 16, 1)
            self.bias = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            x = x + self.offsets
            v = self.factors(x)
            pairs = 0.5 * (v.sum(1) ** 2 - (v**2).sum(1)).sum(1)
            return self.bias + self.line(x).sum((1, 2)) + pairs + self.deep(v.flatten(1)).squeeze(1)

    loss = lambda m, b: F.binary_cross_entropy_with_logits(m(b[0]), b[1])
    return one(Net(), loss, [(torch.randint(0, 10, (16, 3)), (torch.rand(16) < 0.5).float()) for _ in range(2)])


@training("Gaussian process", "Cholesky, triangular solve, log determinant, deep kernel")
def process() -> Training:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.logs = mlp(3, 12, 2, act=nn.Tanh), nn.Parameter(torch.tensor([0.0, 0.0, -1.0]))

        def forward(self, x):
            length, scale, noise = self.logs.exp()
            z = self.body(x) / length
            return scale * torch.exp(-0.5 * torch.cdist(z, z) ** 2) + noise * torch.eye(len(x))

    def loss(m, batch):
        x, y = batch
        root = torch.linalg.cholesky(m(x))
        alpha = torch.cholesky_solve(y[:, None], root).squeeze(1)
        return (0.5 * y @ alpha + root.diagonal().log().sum() + 0.5 * len(x) * math.log(2 * math.pi)) / len(x)

    module = Net()
    return one(module, loss, [(torch.randn(10, 3), torch.randn(10))], adam(module, lr=1e-2))


@training("tabular net", "embeddings of categories by column, feature tokens, class token")
def tabular() -> Training:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.columns = nn.ModuleList(nn.Embedding(n, 12) for n in (4, 7))
            self.weight, self.bias = nn.Parameter(torch.randn(3, 12)), nn.Parameter(torch.zeros(3, 12))
            self.token = nn.Parameter(torch.zeros(1, 1, 12))
            self.layer = nn.TransformerEncoderLayer(12, 2, 24, dropout=0.0, batch_first=True, norm_first=True)
            self.out = nn.Linear(12, 1)

        def forward(self, numbers, kinds):
            x = numbers[..., None] * self.weight + self.bias
            y = torch.stack([column(kinds[:, i]) for i, column in enumerate(self.columns)], 1)
            return self.out(self.layer(torch.cat([self.token.expand(len(x), -1, -1), x, y], 1))[:, 0]).squeeze(1)

    make = lambda: (torch.randn(8, 3), torch.randint(0, 4, (8, 2)), torch.randn(8))
    return one(Net(), lambda m, b: F.huber_loss(m(b[0], b[1]), b[2]), [make() for _ in range(2)])


@training("survival", "Cox's partial likelihood: sorted risks, logcumsumexp")
def survival() -> Training:
    def loss(m, batch):
        x, time, event = batch
        risk = m(x).squeeze(1)[time.argsort(descending=True)]
        event = event[time.argsort(descending=True)]
        return -((risk - torch.logcumsumexp(risk, 0)) * event).sum() / event.sum()

    make = lambda: (torch.randn(12, 5), torch.rand(12), (torch.arange(12) % 3 > 0).float())
    return one(mlp(5, 16, 1), loss, [make() for _ in range(2)])


@training("Fourier neural operator", "complex weights on low frequencies, einsum")
def fno() -> Training:
    class Net(nn.Module):
        def __init__(self, wide: int = 8, modes: int = 4):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(wide, wide, modes, dtype=torch.cfloat) / wide**2)
            self.inp, self.near, self.out = nn.Linear(2, wide), nn.Conv1d(wide, wide, 1), nn.Linear(wide, 1)

        def forward(self, x):
            y = self.inp(x).transpose(1, 2)
            waves = torch.fft.rfft(y)
            made = torch.zeros_like(waves)
            made[..., :4] = torch.einsum("bim,iom->bom", waves[..., :4], self.weight)
            return self.out(F.gelu(torch.fft.irfft(made, n=y.shape[-1]) + self.near(y)).transpose(1, 2))

    return one(
        Net(),
        lambda m, b: F.mse_loss(m(b[0]), b[1]),
        [(torch.randn(4, 16, 2), torch.randn(4, 16, 1)) for _ in range(2)],
    )
