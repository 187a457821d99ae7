"""Idioms around values, gradients and modules: masks, branches, own Functions, tied and exchanged layers."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.e2e.idioms.case import Case, Net, adamw, batches, case, labelled, mse, net


@case
def masked_rows():
    def loss(m, b):
        out, y = m(b[0]), b[1]
        keep = y > 0
        return F.cross_entropy(out[keep], y[keep])

    return Case(net(4), loss, adamw, labelled())


@case
def boolean_mask_mean():
    def loss(m, b):
        e = (m(b[0]) - b[1]) ** 2
        return e[b[1] > 0].mean() + e[b[1] <= 0].sum() / len(e)

    return Case(Net(), loss, adamw, batches())


@case
def branch_on_tensor():
    def loss(m, b):
        base = mse(m, b)
        if base > 1.0:
            base = base * 0.5
        return base

    return Case(Net(), loss, adamw, batches())


@case
def raises_on_nan():
    def loss(m, b):
        base = mse(m, b)
        if torch.isnan(base):
            raise ValueError("nan")
        return base

    return Case(Net(), loss, adamw, batches())


@case
def checkpointed():
    class C(Net):
        def forward(self, x):
            return self.b(checkpoint(lambda x: torch.tanh(self.a(x)), x, use_reentrant=False))

    return Case(C(), mse, adamw, batches())


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return -ctx.scale * grad * torch.sigmoid(x), None


@case
def own_function():
    class C(Net):
        def forward(self, x):
            return self.b(Reverse.apply(torch.tanh(self.a(x)), 0.5))

    return Case(C(), mse, adamw, batches())


@case
def gradient_penalty():
    def loss(m, b):
        x = b[0].clone().requires_grad_()
        out = m(x)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, b[1]) + 0.1 * (g.norm(2, dim=1) - 1).pow(2).mean()

    return Case(Net(), loss, adamw, batches())


@case
def vmap_inside():
    def loss(m, b):
        w = dict(m.named_parameters())
        out = torch.func.vmap(lambda x: torch.func.functional_call(m, w, x))(b[0])
        return F.mse_loss(out, b[1])

    return Case(Net(), loss, adamw, batches())


@case
def weight_tying():
    class C(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(torch.tanh(self.embed(ids)))

    g = torch.Generator().manual_seed(0)
    data = [torch.randint(0, 20, (4, 9), generator=g) for _ in range(12)]
    return Case(C(), lambda m, b: F.cross_entropy(m(b[:, :-1]).flatten(0, 1), b[:, 1:].flatten()), adamw, data)


@case
def autocast_region():
    def loss(m, b):
        with torch.autocast("cpu", torch.bfloat16):
            out = m(b[0])
        return F.mse_loss(out.float(), b[1])

    return Case(Net(), loss, adamw, batches())


@case
def criterion_with_parameters():
    sigma = nn.Parameter(torch.zeros(2))

    def loss(m, b):
        e = m(b[0]) - b[1]
        return e.pow(2).mean() * torch.exp(-sigma[0]) + e.abs().mean() * torch.exp(-sigma[1]) + sigma.sum()

    return Case(
        Net(),
        loss,
        lambda m: torch.optim.AdamW([*m.parameters(), sigma], 1e-2),
        batches(),
        observe=lambda: sigma.detach().tolist(),
    )


@case
def requires_grad_flips():
    def before(n, m):
        m.a.requires_grad_(n % 6 < 3)

    return Case(Net(), mse, adamw, batches(), before)


@case
def layer_replaced():
    def before(n, m):
        if n == 6:
            torch.manual_seed(5)
            m[1] = nn.Sequential(nn.ReLU(), nn.Softplus())

    return Case(net(), mse, adamw, batches(), before)


@case
def criterion_exchanged():
    holder = {"criterion": nn.MSELoss()}

    def before(n, m):
        if n == 6:
            holder["criterion"] = nn.SmoothL1Loss(beta=0.5)

    return Case(net(), lambda m, b: holder["criterion"](m(b[0]), b[1]), adamw, batches(), before)
