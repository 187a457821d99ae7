"""Images and points: classifiers, segmentation, super-resolution, style, point clouds, radiance fields."""

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.public_trainings import Training, one, training


def conv(a: int, b: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True))


class Residual(nn.Module):
    def __init__(self, a: int, b: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(conv(a, b, stride), nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b))
        self.skip = nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b))

    def forward(self, x):
        return F.relu(self.body(x) + self.skip(x))


@training("ResNet", "batch norm, SGD with Nesterov's momentum, label smoothing, mixup")
def resnet() -> Training:
    module = nn.Sequential(
        conv(3, 8), Residual(8, 8, 1), Residual(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)
    )

    def loss(m, batch):
        x, labels, lam, order = batch
        scores = m(lam * x + (1 - lam) * x[order])
        both = (F.cross_entropy(scores, y, label_smoothing=0.1) for y in (labels, labels[order]))
        return sum(weight * value for weight, value in zip((lam, 1 - lam), both, strict=True))

    batches = [
        (torch.randn(8, 3, 12, 12), torch.randint(0, 5, (8,)), torch.rand(()), torch.randperm(8)) for _ in range(2)
    ]
    optimizer = torch.optim.SGD(module.parameters(), 0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    return one(module, loss, batches, optimizer)


@training("U-Net", "transposed convolutions, skips, cross entropy and Dice")
def unet() -> Training:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.down1, self.down2, self.middle = conv(1, 8), conv(8, 16), conv(16, 16)
            self.up, self.last, self.out = nn.ConvTranspose2d(16, 8, 2, 2), conv(16, 8), nn.Conv2d(8, 3, 1)

        def forward(self, x):
            a = self.down1(x)
            b = self.middle(self.down2(F.max_pool2d(a, 2)))
            return self.out(self.last(torch.cat([a, self.up(b)], 1)))

    def loss(m, batch):
        scores = m(batch[0])
        hot = F.one_hot(batch[1], 3).permute(0, 3, 1, 2).float()
        shares = scores.softmax(1)
        dice = 2 * (shares * hot).sum((2, 3)) / ((shares + hot).sum((2, 3)) + 1e-6)
        return F.cross_entropy(scores, batch[1]) + 1 - dice.mean()

    return one(Net(), loss, [(torch.randn(4, 1, 8, 8), torch.randint(0, 3, (4, 8, 8))) for _ in range(2)])


@training("super-resolution", "pixel shuffle, Charbonnier loss, Adam")
def superresolution() -> Training:
    module = nn.Sequential(nn.Conv2d(3, 16, 5, 1, 2), nn.Tanh(), nn.Conv2d(16, 12, 3, 1, 1), nn.PixelShuffle(2))
    loss = lambda m, b: torch.sqrt((m(b[0]) - b[1]) ** 2 + 1e-6).mean()
    return one(module, loss, [(torch.rand(4, 3, 6, 6), torch.rand(4, 3, 12, 12)) for _ in range(2)])


@training("style transfer", "Gram matrices of features from hooks of a frozen net, total variation")
def style() -> Training:
    class Transfer(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(conv(3, 8), conv(8, 8)).eval().requires_grad_(False)
            self.net = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.InstanceNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 1))
            self.seen: dict[int, torch.Tensor] = {}
            for number, layer in enumerate(self.features):
                layer.register_forward_hook(lambda m, i, o, number=number: self.seen.__setitem__(number, o))

        def train(self, mode=True):
            super().train(mode)
            self.features.eval()
            return self

        def maps(self, x):
            self.seen.clear()
            self.features(x)
            return dict(self.seen)

    def gram(x):
        x = x.flatten(2)
        return x @ x.transpose(1, 2) / x[0].numel()

    def loss(m, batch):
        content, picture = batch
        made = torch.sigmoid(m.net(content))
        ours, theirs, styled = m.maps(made), m.maps(content), m.maps(picture)
        near = F.mse_loss(ours[1], theirs[1])
        style = sum(F.mse_loss(gram(ours[k]), gram(styled[k]).expand(len(made), -1, -1)) for k in ours)
        variation = (made[..., 1:] - made[..., :-1]).abs().mean() + (made[..., 1:, :] - made[..., :-1, :]).abs().mean()
        return near + 10 * style + 0.1 * variation

    return one(Transfer(), loss, [(torch.rand(2, 3, 8, 8), torch.rand(1, 3, 8, 8)) for _ in range(2)])


@training("PointNet", "learned rotations, maximum over points, regularised transform")
def pointnet() -> Training:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.local = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU())
            self.turn = nn.Linear(16, 9)
            self.shared = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 24, 1))
            self.head = nn.Sequential(nn.Linear(24, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

        def forward(self, points):
            turn = self.turn(self.local(points).max(2)[0]).view(-1, 3, 3) + torch.eye(3)
            x = torch.bmm(points.transpose(1, 2), turn).transpose(1, 2)
            return self.head(self.shared(x).max(2)[0]), turn

    def loss(m, batch):
        scores, turn = m(batch[0])
        gap = torch.eye(3) - torch.bmm(turn, turn.transpose(1, 2))
        return F.nll_loss(F.log_softmax(scores, 1), batch[1]) + 0.001 * gap.norm(dim=(1, 2)).mean()

    return one(Net(), loss, [(torch.randn(6, 3, 12), torch.randint(0, 4, (6,))) for _ in range(2)])


@training("NeRF", "positional encoding, exclusive products along rays, coarse and fine samples")
def nerf() -> Training:
    class Field(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(39, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))

        def forward(self, x):
            waves = [x] + [f(2.0**k * x) for k in range(6) for f in (torch.sin, torch.cos)]
            out = self.body(torch.cat(waves, -1))
            return torch.sigmoid(out[..., :3]), F.relu(out[..., 3])

    def rendered(m, origins, directions, depths):
        colours, density = m(origins[:, None] + directions[:, None] * depths[..., None])
        steps = torch.cat([depths[:, 1:] - depths[:, :-1], torch.full_like(depths[:, :1], 1e10)], -1)
        alpha = 1 - torch.exp(-density * steps)
        passed = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[:, :-1]
        weights = alpha * passed
        return (weights[..., None] * colours).sum(1), weights

    def loss(m, batch):
        origins, directions, depths, draws, pixels = batch
        coarse, weights = rendered(m, origins, directions, depths)
        shares = weights.detach() + 1e-5
        steps = torch.cumsum(shares / shares.sum(-1, keepdim=True), -1)
        place = torch.searchsorted(steps, draws).clamp(max=depths.shape[1] - 1)
        fine = torch.sort(torch.cat([depths, depths.gather(1, place) + 0.01], 1), 1)[0]
        return F.mse_loss(coarse, pixels) + F.mse_loss(rendered(m, origins, directions, fine)[0], pixels)

    def batch():
        directions = F.normalize(torch.randn(8, 3), dim=-1)
        return torch.randn(8, 3), directions, torch.rand(8, 6).sort(1)[0] + 1, torch.rand(8, 4), torch.rand(8, 3)

    return one(Field(), loss, [batch() for _ in range(2)])


@training("optical flow", "grid sampling, correlation of shifted maps, iterative refinement")
def flow() -> Training:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.features, self.step = nn.Conv2d(1, 8, 3, 1, 1), nn.Conv2d(18, 2, 3, 1, 1)

        def forward(self, a, b):
            a, b = self.features(a), self.features(b)
            rows = torch.linspace(-1, 1, a.shape[2])
            grid = torch.stack(torch.meshgrid(rows, rows, indexing="xy"), -1)
            moved, found = torch.zeros(len(a), 2, *a.shape[2:]), []
            for _ in range(3):
                moved = moved.detach()
                warped = F.grid_sample(b, grid + moved.permute(0, 2, 3, 1), align_corners=True)
                moved = moved + self.step(torch.cat([a, warped, moved], 1))
                found.append(moved)
            return found

    def loss(m, batch):
        found = m(batch[0], batch[1])
        return sum(0.8 ** (len(found) - 1 - i) * (flow - batch[2]).abs().mean() for i, flow in enumerate(found))

    make = lambda: (torch.rand(2, 1, 8, 8), torch.rand(2, 1, 8, 8), 0.1 * torch.randn(2, 2, 8, 8))
    return one(Net(), loss, [make() for _ in range(2)])
