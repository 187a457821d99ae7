"""Pretraining without labels: DINO, SimCLR, BYOL, masked autoencoders, VICReg."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.public_trainings import Training, adam, one, training


def encoder(wide: int = 16) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.GELU(), nn.Conv2d(8, wide, 3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


class MultiCropWrapper(nn.Module):
    """DINO's: crops of one size go through the backbone together, all features through the head."""

    def __init__(self, backbone: nn.Module, head: nn.Module):
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, crops):
        crops = crops if isinstance(crops, list) else [crops]
        sizes = torch.tensor([crop.shape[-1] for crop in crops])
        ends = torch.cumsum(torch.unique_consecutive(sizes, return_counts=True)[1], 0)
        begin, features = 0, torch.empty(0)
        for end in ends:
            features = torch.cat((features, self.backbone(torch.cat(crops[begin:end]))))
            begin = end
        return self.head(features)


@training("DINO", "multi-crop wrapper, weight-normed head, centred teacher that follows by average")
def dino() -> Training:
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 8))
            self.last = nn.utils.parametrizations.weight_norm(nn.Linear(8, 12, bias=False))

        def forward(self, x):
            return self.last(F.normalize(self.mlp(x), dim=-1))

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = (MultiCropWrapper(encoder(), Head()) for _ in range(2))
            self.teacher.load_state_dict(self.student.state_dict())
            self.teacher.requires_grad_(False)
            self.register_buffer("center", torch.zeros(1, 12))

    def loss(pair, crops):
        student = (pair.student(crops) / 0.1).chunk(len(crops))
        with torch.no_grad():
            out = pair.teacher(crops[:2])
            teacher = F.softmax((out - pair.center) / 0.04, dim=-1).chunk(2)
            pair.center.copy_(pair.center * 0.9 + out.mean(0, keepdim=True) * 0.1)
        pairs = [(q, s) for i, q in enumerate(teacher) for j, s in enumerate(student) if i != j]
        return sum((-q * F.log_softmax(s, -1)).sum(-1).mean() for q, s in pairs) / len(pairs)

    def follow(pair):
        with torch.no_grad():
            for ours, theirs in zip(pair.teacher.parameters(), pair.student.parameters(), strict=True):
                ours.mul_(0.99).add_(theirs.detach(), alpha=0.01)

    module = Pair()
    crops = lambda: [torch.randn(3, 3, 12, 12) for _ in range(2)] + [torch.randn(3, 3, 8, 8) for _ in range(3)]
    made = one(module, loss, [crops() for _ in range(2)])
    made.after = follow
    return made


@training("SimCLR", "NT-Xent over a matrix without its diagonal")
def simclr() -> Training:
    module = nn.Sequential(encoder(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))

    def loss(m, batch):
        z = F.normalize(m(torch.cat(batch)), dim=1)
        near = z @ z.T / 0.5
        near = near.masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
        n = len(batch[0])
        return F.cross_entropy(near, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]))

    return one(module, loss, [(torch.randn(6, 3, 8, 8), torch.randn(6, 3, 8, 8)) for _ in range(2)])


@training("BYOL", "a target network by average, batch norm, stopped gradients")
def byol() -> Training:
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.online = nn.Sequential(encoder(), nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 8))
            self.target = copy.deepcopy(self.online).requires_grad_(False)
            self.predictor = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))

    def loss(m, batch):
        with torch.no_grad():
            wanted = [F.normalize(m.target(x), dim=-1) for x in batch]
        made = [F.normalize(m.predictor(m.online(x)), dim=-1) for x in batch]
        return sum(2 - 2 * (made[i] * wanted[1 - i]).sum(-1).mean() for i in (0, 1))

    def follow(m):
        with torch.no_grad():
            for ours, theirs in zip(m.target.parameters(), m.online.parameters(), strict=True):
                ours.data = 0.98 * ours.data + 0.02 * theirs.data

    module = Pair()
    made = one(module, loss, [(torch.randn(6, 3, 8, 8), torch.randn(6, 3, 8, 8)) for _ in range(2)])
    made.optimizers["loss"] = adam(module.online, module.predictor)
    made.after = follow
    return made


@training("masked autoencoder", "patches shuffled by noise, gathered and put back")
def mae() -> Training:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch, self.place = nn.Linear(12, 16), nn.Parameter(0.02 * torch.randn(1, 16, 16))
            layer = lambda: nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True, norm_first=True)
            self.encoder, self.decoder, self.out = layer(), layer(), nn.Linear(16, 12)
            self.mask = nn.Parameter(torch.zeros(1, 1, 16))

        def forward(self, patches, noise, keep: int = 6):
            x = self.patch(patches) + self.place
            shuffle = noise.argsort(1)
            restore = shuffle.argsort(1)
            x = self.encoder(x.gather(1, shuffle[:, :keep, None].expand(-1, -1, 16)))
            x = torch.cat([x, self.mask.expand(len(x), 16 - keep, -1)], 1)
            x = x.gather(1, restore[..., None].expand(-1, -1, 16)) + self.place
            hidden = (restore >= keep).float()
            return self.out(self.decoder(x)), hidden

    def loss(m, batch):
        made, hidden = m(*batch)
        wanted = (batch[0] - batch[0].mean(-1, keepdim=True)) / (batch[0].var(-1, keepdim=True) + 1e-6) ** 0.5
        return (((made - wanted) ** 2).mean(-1) * hidden).sum() / hidden.sum()

    return one(Net(), loss, [(torch.randn(4, 16, 12), torch.rand(4, 16)) for _ in range(2)])


@training("VICReg", "variance and covariance terms of two views")
def vicreg() -> Training:
    module = nn.Sequential(encoder(), nn.Linear(16, 12))

    def loss(m, batch):
        a, b = m(batch[0]), m(batch[1])
        spread = sum(F.relu(1 - torch.sqrt(z.var(0) + 1e-4)).mean() for z in (a, b))
        joint = 0.0
        for z in (a, b):
            z = z - z.mean(0)
            matrix = z.T @ z / (len(z) - 1)
            joint = joint + matrix.flatten()[:-1].view(11, 13)[:, 1:].pow(2).sum() / 12
        return 25 * F.mse_loss(a, b) + 25 * spread + joint

    return one(module, loss, [(torch.randn(6, 3, 8, 8), torch.randn(6, 3, 8, 8)) for _ in range(2)])
