"""Generative models: VAE, GANs, flows, energies, diffusion, codes. What they draw comes with the batch."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.public_trainings import Training, adam, one, training


def mlp(*sizes: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers = [layer for a, b in zip(sizes[:-1], sizes[1:], strict=True) for layer in (nn.Linear(a, b), act())]
    return nn.Sequential(*layers[:-1])


@training("VAE", "reparametrised noise, Bernoulli likelihood, KL that is annealed by a number")
def vae() -> Training:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = mlp(16, 24, 8), mlp(4, 24, 16)

        def forward(self, x, noise):
            mean, log_var = self.encoder(x).chunk(2, 1)
            return self.decoder(mean + noise * torch.exp(0.5 * log_var)), mean, log_var

    def loss(m, batch):
        x, noise, weight = batch
        made, mean, log_var = m(x, noise)
        kl = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum()
        return (F.binary_cross_entropy_with_logits(made, x, reduction="sum") + weight * kl) / len(x)

    return one(Net(), loss, [(torch.rand(8, 16), torch.randn(8, 4), 0.1 * i) for i in range(3)])


@training("VQ-VAE", "nearest codes by argmin, straight-through gradient, commitment")
def vqvae() -> Training:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder, self.codes = (
                nn.Conv2d(1, 4, 4, 2, 1),
                nn.ConvTranspose2d(4, 1, 4, 2, 1),
                nn.Embedding(12, 4),
            )

        def forward(self, x):
            z = self.encoder(x).permute(0, 2, 3, 1)
            flat = z.reshape(-1, 4)
            far = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.codes.weight.T + self.codes.weight.pow(2).sum(1)
            code = self.codes(far.argmin(1)).view(z.shape)
            gap = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
            return self.decoder((z + (code - z).detach()).permute(0, 3, 1, 2)), gap

    def loss(m, x):
        made, gap = m(x)
        return F.mse_loss(made, x) + gap

    return one(Net(), loss, [torch.randn(4, 1, 8, 8) for _ in range(2)])


@training("GAN", "two optimizers in turn, batch norm on both sides, spectral norm")
def gan() -> Training:
    maker = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    judge = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 16)), nn.LeakyReLU(0.2), nn.Linear(16, 1)
    )

    def judge_loss(g, d, batch):
        x, z = batch
        real, fake = d(x), d(g(z).detach())
        ones, zeros = torch.full_like(real, 0.9), torch.zeros_like(fake)
        return F.binary_cross_entropy_with_logits(real, ones) + F.binary_cross_entropy_with_logits(fake, zeros)

    def maker_loss(g, d, batch):
        return F.softplus(-d(g(batch[1]))).mean()

    optimizers = {
        n: torch.optim.Adam(m.parameters(), 2e-4, betas=(0.5, 0.999)) for n, m in (("d", judge), ("g", maker))
    }
    batches = [(torch.randn(8, 8), torch.randn(8, 4)) for _ in range(2)]
    return Training({"g": maker, "d": judge}, {"d": judge_loss, "g": maker_loss}, optimizers, batches)


@training("WGAN-GP", "gradient penalty: a gradient of a gradient by autograd.grad")
def wgan() -> Training:
    maker, judge = mlp(4, 16, 8), mlp(8, 16, 1, act=nn.Tanh)

    def judge_loss(g, d, batch):
        x, z, mix = batch
        made = g(z).detach()
        between = (mix * x + (1 - mix) * made).requires_grad_(True)
        (slope,) = torch.autograd.grad(d(between).sum(), between, create_graph=True)
        return d(made).mean() - d(x).mean() + 10 * ((slope.norm(2, 1) - 1) ** 2).mean()

    optimizers = {"d": adam(judge), "g": adam(maker)}
    batches = [(torch.randn(8, 8), torch.randn(8, 4), torch.rand(8, 1)) for _ in range(2)]
    losses = {"d": judge_loss, "g": lambda g, d, b: -d(g(b[1])).mean()}
    return Training({"g": maker, "d": judge}, losses, optimizers, batches)


@training("RealNVP", "coupling layers, permutations, log determinants")
def realnvp() -> Training:
    class Flow(nn.Module):
        def __init__(self):
            super().__init__()
            self.nets = nn.ModuleList(mlp(3, 16, 6, act=nn.Tanh) for _ in range(4))
            self.register_buffer("order", torch.tensor([3, 4, 5, 0, 1, 2]))

        def forward(self, x):
            total = torch.zeros(len(x))
            for net in self.nets:
                a, b = x.chunk(2, 1)
                shift, scale = net(a).chunk(2, 1)
                scale = torch.tanh(scale)
                x, total = torch.cat([a, b * scale.exp() + shift], 1)[:, self.order], total + scale.sum(1)
            return x, total

    def loss(m, x):
        z, log_det = m(x)
        return (0.5 * (z**2 + math.log(2 * math.pi)).sum(1) - log_det).mean()

    return one(Flow(), loss, [torch.randn(8, 6) for _ in range(2)])


@training("Glow", "actnorm set by the first batch, invertible matrix by slogdet")
def glow() -> Training:
    class Step(nn.Module):
        def __init__(self, wide: int = 4):
            super().__init__()
            self.log_scale, self.shift = nn.Parameter(torch.zeros(wide)), nn.Parameter(torch.zeros(wide))
            self.matrix, self.net = nn.Parameter(torch.linalg.qr(torch.randn(wide, wide))[0]), mlp(2, 12, 4)
            self.register_buffer("ready", torch.tensor(False))

        def forward(self, x):
            if not self.ready:
                with torch.no_grad():
                    self.shift.copy_(-x.mean(0))
                    self.log_scale.copy_(-torch.log(x.std(0) + 1e-6))
                    self.ready.fill_(True)
            x = (x + self.shift) * self.log_scale.exp() @ self.matrix
            total = self.log_scale.sum() + torch.linalg.slogdet(self.matrix)[1]
            a, b = x.chunk(2, 1)
            shift, scale = self.net(a).chunk(2, 1)
            scale = torch.sigmoid(scale + 2)
            return torch.cat([a, (b + shift) * scale], 1), total + scale.log().sum(1)

    module = Step()

    def loss(m, x):
        z, log_det = m(x)
        return (0.5 * z.pow(2).sum(1) - log_det).mean()

    return one(module, loss, [torch.randn(8, 4) * 2 + 1 for _ in range(2)], adam(module))


@training("energy model", "Langevin steps inside the loss: gradients by the inputs, clamped")
def energy() -> Training:
    module = mlp(4, 24, 1, act=nn.SiLU)

    def loss(m, batch):
        x, start, noise = batch
        y = start.clone().requires_grad_(True)
        for step in noise:
            (slope,) = torch.autograd.grad(m(y).sum(), y)
            y = (y - 0.1 * slope.clamp(-1, 1) + 0.01 * step).clamp(-3, 3).detach().requires_grad_(True)
        real, fake = m(x), m(y.detach())
        return real.mean() - fake.mean() + 0.1 * (real**2 + fake**2).mean()

    return one(module, loss, [(torch.randn(8, 4), torch.rand(8, 4), torch.randn(3, 8, 4)) for _ in range(2)])


@training("DDPM", "noise schedule by index, sinusoidal times, average of weights")
def ddpm() -> Training:
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 50), 0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.time, self.inp, self.norm = mlp(8, 12), nn.Conv2d(1, 12, 3, 1, 1), nn.GroupNorm(3, 12)
            self.out = nn.Conv2d(12, 1, 3, 1, 1)

        def forward(self, x, t):
            angles = t[:, None] * torch.exp(-math.log(1e4) * torch.arange(4) / 4)
            y = self.inp(x) + self.time(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None]
            return self.out(F.silu(self.norm(y)))

    def loss(m, batch):
        x, t, noise = batch
        a = kept[t][:, None, None, None]
        return F.mse_loss(m(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)

    make = lambda: (torch.randn(4, 1, 8, 8), torch.randint(0, 50, (4,)), torch.randn(4, 1, 8, 8))
    made = one(Net(), loss, [make() for _ in range(2)])
    average = torch.optim.swa_utils.AveragedModel(made.modules["module"], avg_fn=lambda a, b, n: 0.99 * a + 0.01 * b)
    made.after = average.update_parameters
    return made


@training("score matching", "sliced: products with a Hessian")
def score() -> Training:
    module = mlp(4, 24, 4, act=nn.Softplus)

    def loss(m, batch):
        x, v = batch
        x = x.clone().requires_grad_(True)
        s = m(x)
        (slope,) = torch.autograd.grad((s * v).sum(), x, create_graph=True)
        return ((slope * v).sum(1) + 0.5 * (s**2).sum(1)).mean()

    return one(module, loss, [(torch.randn(8, 4), torch.randn(8, 4)) for _ in range(2)])


@training("flow matching", "velocity between noise and data, a conditioned MLP")
def matching() -> Training:
    module = mlp(5, 24, 4, act=nn.SiLU)

    def loss(m, batch):
        x, z, t = batch
        return F.mse_loss(m(torch.cat([(1 - t) * z + t * x, t], 1)), x - z)

    return one(module, loss, [(torch.randn(8, 4), torch.randn(8, 4), torch.rand(8, 1)) for _ in range(2)])
