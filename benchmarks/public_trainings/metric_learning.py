"""Distances, few shots, distillation, sets."""

import math

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from benchmarks.public_trainings import Training, adam, one, training
from benchmarks.public_trainings.generative import mlp


def labelled(rows: int = 12, wide: int = 8, labels: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, wide), torch.arange(rows) % labels


@training("triplets, hard mining", "hardest positive and negative of each row, sum over those that count")
def triplets() -> Training:
    def loss(m, batch):
        z, labels = F.normalize(m(batch[0]), dim=1), batch[1]
        far = torch.cdist(z, z)
        same = labels[:, None] == labels
        positive = (far * (same & ~torch.eye(len(z), dtype=torch.bool))).max(1)[0]
        negative = (far + 10.0 * same).min(1)[0]
        terms = F.relu(positive - negative + 0.2)
        count = (terms > 1e-16).sum()
        return terms.sum() / (count + 1e-16)

    return one(mlp(8, 24, 6), loss, [labelled() for _ in range(2)])


@training("triplets, valid ones", "all triplets selected by nonzero: their number depends on data")
def selected() -> Training:
    def loss(m, batch):
        z, labels = m(batch[0]), batch[1]
        far, same = torch.cdist(z, z), labels[:, None] == labels
        anchor, positive = torch.where(same.triu(1))
        rows, negative = torch.where(~same[anchor])
        gap = far[anchor[rows], positive[rows]] - far[anchor[rows], negative] + 0.5
        return gap[gap > 0].mean()

    return one(mlp(8, 24, 6), loss, [labelled() for _ in range(2)])


@training("ArcFace", "angular margin added to the label's cosine")
def arcface() -> Training:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.weight = mlp(8, 24, 6), nn.Parameter(torch.randn(4, 6))

        def forward(self, x, labels, margin: float = 0.3, scale: float = 8.0):
            cosine = F.linear(F.normalize(self.body(x)), F.normalize(self.weight))
            sine = torch.sqrt((1.0 - cosine**2).clamp(1e-6, 1))
            moved = cosine * math.cos(margin) - sine * math.sin(margin)
            moved = torch.where(cosine > math.cos(math.pi - margin), moved, cosine - math.sin(margin) * margin)
            hot = torch.zeros_like(cosine).scatter_(1, labels[:, None], 1)
            return scale * (hot * moved + (1 - hot) * cosine)

    return one(Net(), lambda m, b: F.cross_entropy(m(*b), b[1]), [labelled() for _ in range(2)])


@training("CLIP", "two towers, a learned temperature that is clamped")
def clip() -> Training:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.image, self.text, self.scale = mlp(8, 24, 6), mlp(5, 24, 6), nn.Parameter(torch.tensor(2.6))

        def forward(self, image, text):
            a, b = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
            return self.scale.exp().clamp(max=100) * a @ b.T

    def loss(m, batch):
        scores, labels = m(*batch), torch.arange(len(batch[0]))
        return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2

    return one(Net(), loss, [(torch.randn(6, 8), torch.randn(6, 5)) for _ in range(2)])


@training("prototypes", "support and query rows of an episode, distances to means")
def prototypes() -> Training:
    def loss(m, batch):
        support, query = batch
        centers = m(support.flatten(0, 1)).view(4, 3, -1).mean(1)
        far = torch.cdist(m(query.flatten(0, 1)), centers) ** 2
        return F.cross_entropy(-far, torch.arange(4).repeat_interleave(2))

    return one(mlp(8, 24, 6), loss, [(torch.randn(4, 3, 8), torch.randn(4, 2, 8)) for _ in range(2)])


@training("MAML", "inner steps by autograd.grad with create_graph, functional_call")
def maml() -> Training:
    def loss(m, tasks):
        total = 0.0
        for x, y, qx, qy in tasks:
            fast = dict(m.named_parameters())
            for _ in range(2):
                inner = F.mse_loss(functional_call(m, fast, (x,)), y)
                slopes = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
                fast = {name: p - 0.05 * g for (name, p), g in zip(fast.items(), slopes, strict=True)}
            total = total + F.mse_loss(functional_call(m, fast, (qx,)), qy)
        return total / len(tasks)

    task = lambda: (torch.randn(5, 1), torch.randn(5, 1), torch.randn(5, 1), torch.randn(5, 1))
    return one(mlp(1, 16, 16, 1, act=nn.Tanh), loss, [[task() for _ in range(2)] for _ in range(2)])


@training("distillation", "frozen teacher under no_grad, softened targets, hints from a hook")
def distillation() -> Training:
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.teacher, self.student = mlp(8, 32, 32, 4).requires_grad_(False), mlp(8, 12, 4)
            self.hint, self.seen = nn.Linear(12, 32), {}
            self.teacher[0].register_forward_hook(lambda m, i, o: self.seen.__setitem__("teacher", o))
            self.student[0].register_forward_hook(lambda m, i, o: self.seen.__setitem__("student", o))

    def loss(m, batch):
        x, labels = batch
        with torch.no_grad():
            wanted = m.teacher(x)
        scores = m.student(x)
        soft = F.kl_div((scores / 4).log_softmax(1), (wanted / 4).softmax(1), reduction="batchmean") * 16
        hint = F.mse_loss(m.hint(m.seen["student"]), m.seen["teacher"])
        return 0.7 * soft + 0.3 * F.cross_entropy(scores, labels) + 0.1 * hint

    return one(Pair(), loss, [labelled() for _ in range(2)])


@training("set transformer", "induced attention, pooling by seeds, masks for sets of several sizes")
def sets() -> Training:
    class Net(nn.Module):
        def __init__(self, wide: int = 12):
            super().__init__()
            self.inp, self.points = nn.Linear(3, wide), nn.Parameter(torch.randn(1, 4, wide))
            self.seed = nn.Parameter(torch.randn(1, 1, wide))
            self.down, self.up, self.pool = (nn.MultiheadAttention(wide, 2, batch_first=True) for _ in range(3))
            self.out = nn.Linear(wide, 4)

        def forward(self, x, mask):
            x, rows = self.inp(x), len(x)
            h, _ = self.down(self.points.expand(rows, -1, -1), x, x, key_padding_mask=mask)
            x = x + self.up(x, h, h)[0]
            return self.out(self.pool(self.seed.expand(rows, -1, -1), x, x, key_padding_mask=mask)[0].squeeze(1))

    def batch():
        mask = torch.arange(6) >= torch.tensor([6, 3, 5, 2])[:, None]
        return torch.randn(4, 6, 3), mask, torch.randint(0, 4, (4,))

    return one(Net(), lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2]), [batch() for _ in range(2)])


@training("domain adversary", "a reversed gradient by autograd.Function, weight from the step's number")
def adversary() -> Training:
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.weight = weight
            return x.view_as(x)

        @staticmethod
        def backward(ctx, slope):
            return -ctx.weight * slope, None

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.label, self.domain = mlp(8, 16, 12), mlp(12, 4), mlp(12, 12, 2)

        def forward(self, x, weight):
            z = F.relu(self.body(x))
            return self.label(z), self.domain(Reverse.apply(z, weight))

    def loss(m, batch):
        x, labels, domain, weight = batch
        scores, where = m(x, weight)
        return F.cross_entropy(scores[:6], labels[:6]) + F.cross_entropy(where, domain)

    module = Net()
    batches = [(*labelled(), torch.arange(12) // 6, 0.5) for _ in range(2)]
    return one(module, loss, batches, adam(module))
