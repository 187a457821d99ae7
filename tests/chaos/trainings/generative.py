# ruff: noqa: E501  # tables of settings read better in whole lines
"""Images and densities: adversaries, autoencoders, diffusion, flows."""

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.chaos.trainings import Training, Update, one, repeated, training


def image_networks():
    torch.manual_seed(0)
    generator = nn.Sequential(
        nn.ConvTranspose2d(16, 16, 4, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
        nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
        nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip
    discriminator = nn.Sequential(
        nn.Conv2d(3, 8, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(8, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(16, 1, 4, bias=False), nn.Flatten(),
    )  # fmt: skip
    return generator, discriminator


@training("pytorch/examples dcgan: two optimizers over two networks")
def dcgan():
    generator, discriminator = image_networks()
    score = F.binary_cross_entropy_with_logits

    def of_discriminator(generator, discriminator, batch):
        images, noise = batch
        real, fake = discriminator(images), discriminator(generator(noise).detach())
        return score(real, torch.ones_like(real)) + score(fake, torch.zeros_like(fake))

    def of_generator(generator, discriminator, batch):
        fake = discriminator(generator(batch[1]))
        return score(fake, torch.ones_like(fake))

    adam = lambda module: torch.optim.Adam(module.parameters(), 2e-4, betas=(0.5, 0.999))
    updates = {
        "discriminator": Update(of_discriminator, adam(discriminator)),
        "generator": Update(of_generator, adam(generator)),
    }
    data = repeated(lambda g: (torch.randn(8, 3, 16, 16, generator=g), torch.randn(8, 16, 1, 1, generator=g)))
    return Training({"generator": generator, "discriminator": discriminator}, updates, data)


@training("igul222/improved_wgan_training: gradient penalty, a derivative inside the loss")
def wgan_gp():
    torch.manual_seed(0)
    mlp = lambda i, o: nn.Sequential(
        nn.Linear(i, 32), nn.Softplus(), nn.Linear(32, 32), nn.Softplus(), nn.Linear(32, o)
    )
    generator, critic = mlp(4, 2), mlp(2, 1)

    def of_critic(generator, critic, batch):
        real, noise, share = batch
        fake = generator(noise).detach()
        between = (share * real + (1 - share) * fake).requires_grad_(True)
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
        return critic(fake).mean() - critic(real).mean() + 10 * penalty

    def of_generator(generator, critic, batch):
        return -critic(generator(batch[1])).mean()

    adam = lambda module: torch.optim.Adam(module.parameters(), 1e-4, betas=(0.5, 0.9))
    updates = {"critic": Update(of_critic, adam(critic)), "generator": Update(of_generator, adam(generator))}
    data = repeated(
        lambda g: (torch.randn(16, 2, generator=g), torch.randn(16, 4, generator=g), torch.rand(16, 1, generator=g))
    )
    return Training({"generator": generator, "critic": critic}, updates, data)


@training("pytorch/examples vae: reconstruction and KL")
def vae():
    torch.manual_seed(0)

    class Vae(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc21, self.fc22 = nn.Linear(64, 32), nn.Linear(32, 8), nn.Linear(32, 8)
            self.fc3, self.fc4 = nn.Linear(8, 32), nn.Linear(32, 64)

        def forward(self, x, noise):
            h = F.relu(self.fc1(x.view(-1, 64)))
            mu, logvar = self.fc21(h), self.fc22(h)
            z = mu + noise * torch.exp(0.5 * logvar)
            return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar

    def loss(model, batch):
        x, noise = batch
        recon, mu, logvar = model(x, noise)
        bce = F.binary_cross_entropy(recon, x.view(-1, 64), reduction="sum")
        return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())

    return one(Vae(), loss, repeated(lambda g: (torch.rand(8, 1, 8, 8, generator=g), torch.randn(8, 8, generator=g))))


@training("CompVis/taming-transformers VQ layer: nearest code, straight-through, usage in a buffer")
def vq_vae():
    torch.manual_seed(0)

    class Vq(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Conv2d(1, 8, 4, stride=4), nn.ConvTranspose2d(8, 1, 4, stride=4)
            self.codes = nn.Embedding(16, 8)
            self.codes.weight.data.uniform_(-1.0 / 16, 1.0 / 16)
            self.register_buffer("usage", torch.zeros(16))

        def forward(self, x):
            z = self.encoder(x).permute(0, 2, 3, 1).contiguous()
            flat = z.view(-1, 8)
            d = flat.pow(2).sum(1, keepdim=True) + self.codes.weight.pow(2).sum(1) - 2 * flat @ self.codes.weight.t()
            nearest = torch.argmin(d, dim=1)
            self.usage.mul_(0.99).add_(F.one_hot(nearest, 16).float().mean(0), alpha=0.01)
            q = self.codes(nearest).view(z.shape)
            commit = ((q.detach() - z) ** 2).mean() + 0.25 * ((q - z.detach()) ** 2).mean()
            q = z + (q - z).detach()
            return self.decoder(q.permute(0, 3, 1, 2)), commit

    def loss(model, x):
        recon, commit = model(x)
        return F.mse_loss(recon, x) + commit, {"commit": commit.detach()}

    return one(Vq(), loss, repeated(lambda g: torch.randn(4, 1, 16, 16, generator=g)))


class Residual(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, i), nn.GroupNorm(4, o)
        self.conv1, self.conv2 = nn.Conv2d(i, o, 3, padding=1), nn.Conv2d(o, o, 3, padding=1)
        self.time, self.skip = nn.Linear(32, o), nn.Conv2d(i, o, 1) if i != o else nn.Identity()

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
        return self.conv2(F.silu(self.norm2(h))) + self.skip(x)


class Denoiser(nn.Module):
    """A UNet with time embedding and attention in the middle, as in Ho et al. 2020."""

    def __init__(self):
        super().__init__()
        self.enter, self.out = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.down, self.middle, self.up = Residual(8, 16), Residual(16, 16), Residual(24, 8)
        self.pool = nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.embed = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))

    def forward(self, x, steps):
        frequencies = torch.exp(-math.log(10000) * torch.arange(8) / 8)
        angles = steps[:, None].float() * frequencies
        t = self.embed(torch.cat([angles.sin(), angles.cos()], 1))
        first = self.enter(x)
        h = self.pool(self.down(first, t))
        tokens = h.flatten(2).transpose(1, 2)
        h = h + self.attention(tokens, tokens, tokens)[0].transpose(1, 2).view(h.shape)
        h = F.interpolate(self.middle(h, t), scale_factor=2.0, mode="nearest")
        return self.out(self.up(torch.cat([h, first], 1), t))


@training("huggingface/diffusers train_unconditional: predicted noise, averaged weights")
def diffusion():
    torch.manual_seed(0)
    model = Denoiser()
    average = copy.deepcopy(model).requires_grad_(False)
    betas = torch.linspace(1e-4, 0.02, 1000)
    kept = torch.cumprod(1 - betas, 0)

    def loss(model, batch):
        images, noise, steps = batch
        share = kept[steps][:, None, None, None]
        return F.mse_loss(model(share.sqrt() * images + (1 - share).sqrt() * noise, steps), noise)

    def after(modules):
        with torch.no_grad():
            for a, p in zip(average.parameters(), modules["model"].parameters(), strict=True):
                a.lerp_(p.detach(), 0.001)

    def batch(g):
        return (
            torch.randn(4, 3, 16, 16, generator=g),
            torch.randn(4, 3, 16, 16, generator=g),
            torch.randint(1000, (4,), generator=g),
        )

    return one(model, loss, repeated(batch), after=after)


@training("huggingface/diffusers UNet2DModel, as the library makes it")
def diffusers_unet():
    import diffusers

    torch.manual_seed(0)
    model = diffusers.UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4, dropout=0.0,
    )  # fmt: skip
    scheduler = diffusers.DDPMScheduler(num_train_timesteps=1000)

    def loss(model, batch):
        images, noise, steps = batch
        return F.mse_loss(model(scheduler.add_noise(images, noise, steps), steps).sample, noise)

    def batch(g):
        return (
            torch.randn(2, 3, 16, 16, generator=g),
            torch.randn(2, 3, 16, 16, generator=g),
            torch.randint(1000, (2,), generator=g),
        )

    return one(model, loss, repeated(batch), rate=1e-4)


@training("chaiyujin/glow-pytorch: affine couplings, invertible 1x1 products by log determinant")
def glow():
    torch.manual_seed(0)

    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.linalg.qr(torch.randn(6, 6))[0])
            self.log_scale, self.shift = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(6))
            self.net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 6))
            nn.init.zeros_(self.net[-1].weight)

        def forward(self, x):
            x = (x + self.shift) * torch.exp(self.log_scale)
            log_det = self.log_scale.sum() + torch.linalg.slogdet(self.weight)[1]
            a, b = (x @ self.weight.T).chunk(2, -1)
            shift, scale = self.net(a).chunk(2, -1)
            scale = torch.sigmoid(scale + 2)
            return torch.cat([a, (b + shift) * scale], -1), log_det + scale.log().sum(-1)

    class Flow(nn.Module):
        def __init__(self):
            super().__init__()
            self.steps = nn.ModuleList(Step() for _ in range(3))

        def log_prob(self, x):
            total = 0
            for step in self.steps:
                x, log_det = step(x)
                total = total + log_det
            return torch.distributions.Normal(0.0, 1.0).log_prob(x).sum(-1) + total

        forward = log_prob

    return one(Flow(), lambda model, x: -model.log_prob(x).mean(), repeated(lambda g: torch.randn(16, 6, generator=g)))


@training("knowledge distillation, pytorch tutorials: soft targets of a frozen teacher")
def distillation():
    torch.manual_seed(0)
    mlp = lambda width: nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, 5))
    teacher, student = mlp(64).eval().requires_grad_(False), mlp(8)

    def loss(student, teacher, batch):
        x, labels = batch
        with torch.no_grad():
            soft = F.softmax(teacher(x) / 2, -1)
        log_p = F.log_softmax(student(x) / 2, -1)
        soft_loss = torch.sum(soft * (soft.log() - log_p)) / len(x) * 4
        return 0.25 * soft_loss + 0.75 * F.cross_entropy(student(x), labels)

    data = repeated(lambda g: (torch.randn(16, 10, generator=g), torch.randint(5, (16,), generator=g)))
    update = Update(loss, torch.optim.Adam(student.parameters(), 1e-3))
    return Training({"student": student, "teacher": teacher}, {"loss": update}, data)


@training("adambielski/siamese-triplet: hardest pairs of a batch, margins")
def triplets():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.PReLU(), nn.Linear(32, 4))

    def loss(model, batch):
        x, labels = batch
        distance = torch.cdist(model(x), model(x))
        same = labels[:, None] == labels[None]
        farthest = (distance * same).max(1).values
        nearest = distance.masked_fill(same, float("inf")).min(1).values
        return F.relu(farthest - nearest + 1.0).mean()

    return one(model, loss, repeated(lambda g: (torch.randn(12, 10, generator=g), torch.arange(12) % 3)))
