"""Detectors whose losses count objects: anchors matched by overlap, a grid in the way of YOLO, a set by assignment."""

import torch
from scipy.optimize import linear_sum_assignment
from torch import nn
from torch.nn import functional as F

from benchmarks.public_trainings import Training, one, training


def overlaps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Intersection over union of every pair of boxes (x1, y1, x2, y2): [n, m]."""
    low, high = torch.maximum(a[:, None, :2], b[None, :, :2]), torch.minimum(a[:, None, 2:], b[None, :, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    sizes = [(x[:, 2:] - x[:, :2]).prod(-1) for x in (a, b)]
    return shared / (sizes[0][:, None] + sizes[1][None] - shared + 1e-9)


def boxes(count: int) -> torch.Tensor:
    corner = torch.rand(count, 2) * 0.6
    return torch.cat([corner, corner + 0.15 + torch.rand(count, 2) * 0.25], 1)


def backbone(out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.SiLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.SiLU(), nn.Conv2d(16, out, 1)
    )


def targets() -> list[dict[str, torch.Tensor]]:
    return [{"boxes": boxes(n), "labels": torch.randint(0, 3, (n,))} for n in torch.randint(1, 4, (3,)).tolist()]


@training("anchor detector", "boxes matched by overlap, positives by boolean masks, hard negatives")
def anchors() -> Training:
    module, side = backbone(3 * (4 + 4)), 4
    centers = (torch.stack(torch.meshgrid(*[torch.arange(side)] * 2, indexing="ij"), -1).flip(-1) + 0.5) / side
    sizes = torch.tensor([0.2, 0.3, 0.45])
    grid = torch.cat([centers[:, :, None] - sizes[:, None] / 2, centers[:, :, None] + sizes[:, None] / 2], -1).view(
        -1, 4
    )

    def loss(m, batch):
        images, wanted = batch
        out = m(images).permute(0, 2, 3, 1).reshape(len(images), -1, 8)
        total = out.new_zeros(())
        for row, target in zip(out, wanted, strict=True):
            best, which = overlaps(grid, target["boxes"]).max(1)
            positive = best > 0.35
            labels = torch.where(positive, target["labels"][which] + 1, 0)
            entropy = F.cross_entropy(row[:, 4:], labels, reduction="none")
            count = int(positive.sum())
            hard = entropy[~positive].topk(min(3 * max(count, 1), int((~positive).sum())))[0]
            total = total + (entropy[positive].sum() + hard.sum()) / max(count, 1)
            if count:
                gap = target["boxes"][which[positive]] - grid[positive]
                total = total + F.smooth_l1_loss(row[positive, :4], gap)
        return total / len(images)

    return one(module, loss, [(torch.randn(3, 3, 16, 16), targets()) for _ in range(3)])


@training("YOLO's loss", "one list of targets, cells selected by index, objectness by overlap")
def yolo() -> Training:
    module, side = backbone(8), 4

    def batch():
        counts = torch.randint(1, 4, (3,)).tolist()
        rows = [
            torch.cat([torch.full((n, 1), float(i)), torch.randint(0, 3, (n, 1)).float(), boxes(n)], 1)
            for i, n in enumerate(counts)
        ]
        return torch.randn(3, 3, 16, 16), torch.cat(rows)

    def loss(m, batch):
        images, wanted = batch
        out = m(images).permute(0, 2, 3, 1)
        image, label, box = wanted[:, 0].long(), wanted[:, 1].long(), wanted[:, 2:]
        center = (box[:, :2] + box[:, 2:]) / 2 * side
        cell = center.long().clamp(0, side - 1)
        chosen = out[image, cell[:, 1], cell[:, 0]]
        middle = (torch.sigmoid(chosen[:, :2]) + cell) / side
        wide = torch.exp(chosen[:, 2:4].clamp(max=2)) * 0.3
        made = torch.cat([middle - wide / 2, middle + wide / 2], 1)
        overlap = overlaps(made, box).diagonal()
        objects = torch.zeros_like(out[..., 4])
        objects[image, cell[:, 1], cell[:, 0]] = overlap.detach().clamp(0)
        hot = F.one_hot(label, 3).float()
        return (
            (1 - overlap).mean()
            + F.binary_cross_entropy_with_logits(out[..., 4], objects)
            + F.binary_cross_entropy_with_logits(chosen[:, 5:], hot)
        )

    return one(module, loss, [batch() for _ in range(3)])


@training("DETR", "queries assigned to objects by scipy between forward and loss")
def detr() -> Training:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.queries = backbone(16), nn.Parameter(torch.randn(5, 16))
            self.layer = nn.TransformerDecoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
            self.label, self.box = nn.Linear(16, 4), nn.Linear(16, 4)

        def forward(self, x):
            memory = self.body(x).flatten(2).transpose(1, 2)
            y = self.layer(self.queries.expand(len(x), -1, -1), memory)
            return self.label(y), torch.sigmoid(self.box(y))

    def loss(m, batch):
        images, wanted = batch
        scores, found = m(images)
        total = scores.new_zeros(())
        for row, place, target in zip(scores, found, wanted, strict=True):
            with torch.no_grad():
                cost = torch.cdist(place, target["boxes"], p=1) - row.softmax(-1)[:, target["labels"]]
                query, object_ = linear_sum_assignment(cost.cpu().numpy())
            labels = torch.full((len(row),), 3)
            labels[query] = target["labels"][object_]
            total = total + F.cross_entropy(row, labels) + F.l1_loss(place[query], target["boxes"][object_])
        return total / len(images)

    return one(Net(), loss, [(torch.randn(3, 3, 16, 16), targets()) for _ in range(2)])
