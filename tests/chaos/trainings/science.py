"""Graphs, differential equations and forces."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.chaos.trainings import Training, Update, draws, one, repeated, training


def graph(g, nodes: int = 20, edges: int = 60):
    return torch.randint(nodes, (2, edges), generator=g)


@training("tkipf/pygcn: normalized sums over neighbours, masked nodes")
def gcn():
    torch.manual_seed(0)
    g = draws(1)
    x, edges, labels = torch.randn(20, 8, generator=g), graph(g), torch.randint(3, (20,), generator=g)
    train = torch.arange(20) < 12

    class Gcn(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)

        def spread(self, x, edges):
            source, target = edges
            degree = torch.zeros(len(x)).scatter_add_(0, target, torch.ones(len(target))) + 1
            norm = degree.rsqrt()
            out = torch.zeros_like(x).index_add_(0, target, x[source] * (norm[source] * norm[target])[:, None])
            return out + x / degree[:, None]

        def forward(self, x, edges):
            return F.log_softmax(self.spread(self.second(F.relu(self.spread(self.first(x), edges))), edges), 1)

    def loss(model, batch):
        x, edges, labels, train = batch
        return F.nll_loss(model(x, edges)[train], labels[train])

    return one(Gcn(), loss, [(x, edges, labels, train)] * 20, rate=1e-2)


@training("PetarV-/GAT by edges: softmax over the neighbours of each node")
def gat():
    torch.manual_seed(0)

    class Gat(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.source, self.target = nn.Linear(8, 16), nn.Linear(16, 1), nn.Linear(16, 1)
            self.out = nn.Linear(16, 1)

        def forward(self, x, edges):
            h = self.lin(x)
            a, b = edges
            score = F.leaky_relu(self.source(h)[a] + self.target(h)[b], 0.2).squeeze(1)
            top = torch.full((len(x),), -torch.inf).scatter_reduce(0, b, score, "amax")
            weight = torch.exp(score - top[b])
            total = torch.zeros(len(x)).index_add(0, b, weight)
            return self.out(F.elu(torch.zeros_like(h).index_add(0, b, h[a] * (weight / total[b])[:, None])))

    data = repeated(lambda g: (torch.randn(20, 8, generator=g), graph(g), torch.randn(20, 1, generator=g)))
    return one(Gat(), lambda model, b: F.mse_loss(model(b[0], b[1]), b[2]), data)


@training("atomistic-machine-learning/schnetpack: forces are gradients inside the loss")
def schnet_forces():
    torch.manual_seed(0)

    class SchNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.filter = nn.Embedding(5, 16), nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
            self.enter, self.leave, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 1)
            self.register_buffer("centres", torch.linspace(0, 3, 8))

        def forward(self, kinds, positions, edges):
            i, j = edges
            distance = (positions[i] - positions[j]).norm(dim=1)
            basis = torch.exp(-4 * (distance[:, None] - self.centres) ** 2)
            h = self.embed(kinds)
            message = torch.zeros_like(h).index_add(0, i, self.enter(h)[j] * self.filter(basis))
            return self.out(h + F.silu(self.leave(message))).sum()

    def loss(model, batch):
        kinds, positions, edges, energy, forces = batch
        positions = positions.requires_grad_(True)
        predicted = model(kinds, positions, edges)
        (slope,) = torch.autograd.grad(predicted, positions, create_graph=True)
        return (predicted - energy) ** 2 + 10 * F.mse_loss(-slope, forces)

    pairs = torch.tensor([(i, j) for i in range(6) for j in range(6) if i != j]).T

    def batch(g):
        return (
            torch.randint(5, (6,), generator=g), torch.randn(6, 3, generator=g), pairs, torch.randn((), generator=g),
            torch.randn(6, 3, generator=g),
        )  # fmt: skip

    return one(SchNet(), loss, repeated(batch))


@training("vgsatorras/egnn: coordinates move with the messages")
def egnn():
    torch.manual_seed(0)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.edge = nn.Sequential(nn.Linear(17, 16), nn.SiLU(), nn.Linear(16, 16), nn.SiLU())
            self.node, self.move = nn.Sequential(nn.Linear(24, 16), nn.SiLU(), nn.Linear(16, 8)), nn.Linear(16, 1)

        def forward(self, h, x, edges):
            i, j = edges
            away = x[i] - x[j]
            m = self.edge(torch.cat([h[i], h[j], (away**2).sum(1, keepdim=True)], 1))
            count = torch.zeros(len(x), 1).index_add(0, i, torch.ones(len(i), 1)).clamp(min=1)
            x = x + torch.zeros_like(x).index_add(0, i, away * self.move(m)) / count
            return h + self.node(torch.cat([h, torch.zeros(len(h), 16).index_add(0, i, m)], 1)), x

    class Egnn(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))

        def forward(self, h, x, edges):
            for layer in self.layers:
                h, x = layer(h, x, edges)
            return x

    def batch(g):
        return (
            torch.randn(10, 8, generator=g),
            torch.randn(10, 3, generator=g),
            graph(g, 10, 40),
            torch.randn(10, 3, generator=g),
        )

    return one(Egnn(), lambda model, b: F.mse_loss(model(*b[:3]), b[3]), repeated(batch))


@training("maziarraissi/PINNs: Burgers' equation, second derivatives by autograd")
def pinn_burgers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))

    def loss(model, batch):
        x, t, x0, u0 = batch
        x, t = x.requires_grad_(True), t.requires_grad_(True)
        u = model(torch.cat([x, t], 1))
        slope = lambda y, z: torch.autograd.grad(y, z, torch.ones_like(y), create_graph=True)[0]
        u_x = slope(u, x)
        residual = slope(u, t) + u * u_x - 0.01 / torch.pi * slope(u_x, x)
        return F.mse_loss(model(torch.cat([x0, torch.zeros_like(x0)], 1)), u0) + (residual**2).mean()

    def batch(g):
        x0 = torch.rand(16, 1, generator=g) * 2 - 1
        return torch.rand(32, 1, generator=g) * 2 - 1, torch.rand(32, 1, generator=g), x0, -torch.sin(torch.pi * x0)

    return one(model, loss, repeated(batch))


@training("rtqichen/torchdiffeq: a neural ODE by fixed Runge-Kutta steps")
def neural_ode():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))

    def loss(model, batch):
        y, wanted = batch
        step, path = 0.1, [y]
        for _ in range(8):
            k1 = model(y**3)
            k2 = model((y + step * k1 / 3) ** 3)
            k3 = model((y + step * (k2 - k1 / 3)) ** 3)
            k4 = model((y + step * (k1 - k2 + k3)) ** 3)
            y = y + (k1 + 3 * (k2 + k3) + k4) * step * 0.125
            path.append(y)
        return (torch.stack(path) - wanted).abs().mean()

    optimizer = torch.optim.RMSprop(model.parameters(), 1e-3)
    data = repeated(lambda g: (torch.rand(8, 2, generator=g), torch.rand(9, 8, 2, generator=g)))
    return Training({"model": model}, {"loss": Update(loss, optimizer)}, data)


@training("rtqichen/torchdiffeq odeint with dopri5: steps that depend on the values")
def neural_ode_adaptive():
    from torchdiffeq import odeint

    torch.manual_seed(0)

    class Field(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

        def forward(self, t, y):
            return self.net(y**3)

    def loss(model, batch):
        y, wanted = batch
        return (odeint(model, y, torch.linspace(0, 1, 4), method="dopri5") - wanted).abs().mean()

    return one(Field(), loss, repeated(lambda g: (torch.rand(4, 2, generator=g), torch.rand(4, 4, 2, generator=g))))


@training("greydanus/hamiltonian-nn: time derivatives from an energy")
def hamiltonian():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))

    def loss(model, batch):
        x, slope = batch
        x = x.requires_grad_(True)
        (d,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return F.mse_loss(d @ torch.tensor([[0.0, -1.0], [1.0, 0.0]]), slope)

    return one(model, loss, repeated(lambda g: torch.randn(2, 16, 2, generator=g).unbind()))


@training("neuraloperator/neuraloperator FNO: products of complex modes")
def fourier_operator():
    torch.manual_seed(0)

    class Fno(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.skip, self.out = nn.Linear(2, 8), nn.Conv1d(8, 8, 1), nn.Linear(8, 1)
            self.weight = nn.Parameter(torch.rand(8, 8, 5, dtype=torch.cfloat) / 64)

        def forward(self, x):
            h = self.enter(x).permute(0, 2, 1)
            modes = torch.fft.rfft(h)
            out = torch.zeros(len(h), 8, h.shape[-1] // 2 + 1, dtype=torch.cfloat)
            out[:, :, :5] = torch.einsum("bix,iox->box", modes[:, :, :5], self.weight)
            h = F.gelu(torch.fft.irfft(out, n=h.shape[-1]) + self.skip(h))
            return self.out(h.permute(0, 2, 1))

    def loss(model, batch):
        x, y = batch
        return ((model(x) - y).flatten(1).norm(dim=1) / y.flatten(1).norm(dim=1)).mean()

    data = repeated(lambda g: (torch.randn(4, 24, 2, generator=g), torch.randn(4, 24, 1, generator=g)))
    return one(Fno(), loss, data)


@training("lululxvi/deepxde DeepONet: branch and trunk")
def deep_o_net():
    torch.manual_seed(0)

    class DeepONet(nn.Module):
        def __init__(self):
            super().__init__()
            self.branch = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 8))
            self.trunk = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
            self.b = nn.Parameter(torch.zeros(1))

        def forward(self, u, y):
            return torch.einsum("bi,ni->bn", self.branch(u), self.trunk(y)) + self.b

    model = DeepONet()
    data = repeated(
        lambda g: (torch.randn(8, 10, generator=g), torch.rand(12, 1, generator=g), torch.randn(8, 12, generator=g))
    )
    update = Update(lambda m, b: F.mse_loss(m(b[0], b[1]), b[2]), torch.optim.Adam(model.parameters(), 1e-3))
    return Training({"model": model}, {"loss": update}, data)
