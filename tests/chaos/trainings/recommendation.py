"""Recommendation, tables and learning to learn."""

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from tests.chaos.trainings import Training, Update, one, repeated, training


@training("facebookresearch/dlrm: bags of ids, pairwise products of embeddings")
def dlrm():
    torch.manual_seed(0)

    class Dlrm(nn.Module):
        def __init__(self):
            super().__init__()
            self.bags = nn.ModuleList(nn.EmbeddingBag(50, 8, mode="sum") for _ in range(3))
            self.bottom, self.top = (
                nn.Sequential(nn.Linear(5, 8), nn.ReLU()),
                nn.Sequential(nn.Linear(14, 1), nn.Sigmoid()),
            )

        def forward(self, dense, offsets, ids):
            x = self.bottom(dense)
            rows = [bag(i, o) for bag, i, o in zip(self.bags, ids, offsets, strict=True)]
            t = torch.cat([x, *rows], 1).view(len(x), -1, 8)
            z = torch.bmm(t, t.transpose(1, 2))
            i, j = torch.tril_indices(4, 4, offset=-1)
            return self.top(torch.cat([x, z[:, i, j]], 1))

    def batch(g):
        offsets = torch.arange(0, 24, 3).repeat(3, 1)
        return (
            torch.randn(8, 5, generator=g),
            offsets,
            torch.randint(50, (3, 24), generator=g),
            torch.rand(8, 1, generator=g).round(),
        )

    return one(Dlrm(), lambda model, b: F.binary_cross_entropy(model(*b[:3]), b[3]), repeated(batch))


@training("tensorflow two-tower in torch: softmax over the batch, frequency correction")
def two_towers():
    torch.manual_seed(0)
    tower = lambda: nn.Sequential(nn.Embedding(60, 16), nn.Linear(16, 8))
    modules = {"users": tower(), "items": tower()}

    def loss(users, items, batch):
        user, item, often = batch
        scores = F.normalize(users(user), dim=-1) @ F.normalize(items(item), dim=-1).T / 0.1 - often.log()
        return F.cross_entropy(scores, torch.arange(len(user)))

    def batch(g):
        return (
            torch.randint(60, (16,), generator=g),
            torch.randint(60, (16,), generator=g),
            torch.rand(16, generator=g) + 0.1,
        )

    parameters = [p for module in modules.values() for p in module.parameters()]
    return Training(modules, {"loss": Update(loss, torch.optim.Adagrad(parameters, 0.05))}, repeated(batch))


@training("xue-pai/FuxiCTR DeepFM")
def deep_fm():
    torch.manual_seed(0)

    class DeepFm(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.embed = nn.Embedding(80, 1), nn.Embedding(80, 8)
            self.deep = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))

        def forward(self, ids):
            e = self.embed(ids)
            pairs = 0.5 * (e.sum(1).pow(2) - e.pow(2).sum(1)).sum(1, keepdim=True)
            return (self.linear(ids).sum(1) + pairs + self.deep(e.flatten(1))).squeeze(1)

    data = repeated(lambda g: (torch.randint(80, (16, 4), generator=g), torch.rand(16, generator=g).round()))
    return one(DeepFm(), lambda model, b: F.binary_cross_entropy_with_logits(model(b[0]), b[1]), data)


@training("yandex-research/rtdl FT-Transformer: a token per column")
def table_transformer():
    torch.manual_seed(0)

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(6, 16)), nn.Parameter(torch.randn(6, 16))
            self.cls = nn.Parameter(torch.randn(1, 1, 16))
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
            self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 1)

        def forward(self, x):
            tokens = x[..., None] * self.weight + self.bias
            return self.head(self.encoder(torch.cat([self.cls.expand(len(x), -1, -1), tokens], 1))[:, 0])

    data = repeated(lambda g: (torch.randn(8, 6, generator=g), torch.randn(8, 1, generator=g)))
    return one(Table(), lambda model, b: F.mse_loss(model(b[0]), b[1]), data)


@training("dragen1860/MAML-Pytorch: a gradient step inside the loss")
def maml():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))

    def loss(model, tasks):
        total = 0.0
        for x, y, x_query, y_query in zip(*tasks, strict=True):
            weights = dict(model.named_parameters())
            inner = F.mse_loss(functional_call(model, weights, x), y)
            slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            fast = {name: w - 0.1 * s for (name, w), s in zip(weights.items(), slopes, strict=True)}
            total = total + F.mse_loss(functional_call(model, fast, x_query), y_query)
        return total / len(tasks[0])

    return one(model, loss, repeated(lambda g: list(torch.randn(4, 3, 8, 1, generator=g).unbind())))
