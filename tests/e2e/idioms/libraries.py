"""Idioms around libraries: transformers, timm, layers of torch.nn, metrics; and several updates."""

import contextlib
import functools

import torch
from torch import nn
from torch.nn import functional as F

from tests.e2e.idioms.case import Case, Net, adamw, batches, case, mse, sgd


def ids(steps=10, rows=4, length=12, vocabulary=64):
    g = torch.Generator().manual_seed(0)
    return [torch.randint(1, vocabulary, (rows, length), generator=g) for _ in range(steps)]


@case
def hf_bert():
    import transformers as t

    torch.manual_seed(0)
    c = t.BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
                     hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3)  # fmt: skip
    m = t.BertForSequenceClassification(c)
    data = [{"input_ids": i, "attention_mask": (i > 5).long(), "labels": i[:, 0] % 3} for i in ids()]
    return Case(m, lambda m, b: m(**b).loss, adamw, data)


@case
def hf_gpt2():
    import transformers as t

    torch.manual_seed(0)
    c = t.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    m = t.GPT2LMHeadModel(c)
    return Case(m, lambda m, b: m(input_ids=b, labels=b)["loss"], adamw, ids())


@case
def hf_t5():
    import transformers as t

    torch.manual_seed(0)
    c = t.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    m = t.T5ForConditionalGeneration(c)
    return Case(m, lambda m, b: m(input_ids=b, labels=b.flip(1)).loss, adamw, ids())


@case
def timm_vit():
    import timm

    torch.manual_seed(0)
    m = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=4)
    g = torch.Generator().manual_seed(0)
    data = [(torch.randn(4, 3, 32, 32, generator=g), torch.randint(0, 4, (4,), generator=g)) for _ in range(10)]
    return Case(m, lambda m, b: F.cross_entropy(m(b[0]), b[1]), lambda m: torch.optim.AdamW(m.parameters(), 1e-3), data)


@case
def timm_resnet():
    import timm

    torch.manual_seed(0)
    m = timm.create_model("resnet10t", num_classes=4)
    g = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, 3, 64, 64, generator=g), torch.randint(0, 4, (8,), generator=g)) for _ in range(10)]
    return Case(m, lambda m, b: F.cross_entropy(m(b[0]), b[1]), lambda m: torch.optim.SGD(m.parameters(), 0.01), data)


@case
def lstm_tagger():
    class C(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.embed, self.lstm, self.head = nn.Embedding(64, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 5)

        def forward(self, i):
            return self.head(self.lstm(self.embed(i))[0])

    return Case(C(), lambda m, b: F.cross_entropy(m(b).flatten(0, 1), (b % 5).flatten()), adamw, ids())


@case
def transformer_encoder():
    torch.manual_seed(1)
    m = nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 16, 0.0, batch_first=True), 2)
    g = torch.Generator().manual_seed(0)
    data = [(torch.randn(4, 7, 6, generator=g), torch.randn(4, 7, 6, generator=g)) for _ in range(10)]
    return Case(m, lambda m, b: F.mse_loss(m(b[0]), b[1]), adamw, data)


@case
def conv_pool_unet():
    class C(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.down, self.mid, self.up = (
                nn.Conv2d(3, 8, 3, padding=1),
                nn.Conv2d(8, 8, 3, padding=1),
                nn.ConvTranspose2d(8, 8, 2, 2),
            )
            self.out = nn.Conv2d(16, 1, 1)

        def forward(self, x):
            a = F.relu(self.down(x))
            b = F.relu(self.mid(F.max_pool2d(a, 2)))
            b = F.avg_pool2d(F.interpolate(self.up(b), scale_factor=2, mode="bilinear"), 2)
            return self.out(torch.cat([a, b], 1))

    g = torch.Generator().manual_seed(0)
    data = [(torch.randn(2, 3, 16, 16, generator=g), torch.rand(2, 1, 16, 16, generator=g)) for _ in range(10)]
    return Case(C(), lambda m, b: F.binary_cross_entropy_with_logits(m(b[0]), b[1]), adamw, data)


@case
def graph_scatter():
    class C(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 1)

        def forward(self, x, edges):
            m = self.a(x)[edges[0]]
            h = torch.zeros(len(x), 8).index_add_(0, edges[1], m)
            deg = torch.zeros(len(x)).scatter_add_(0, edges[1], torch.ones(edges.shape[1])).clamp(min=1)
            return self.b(torch.relu(h / deg[:, None]))

    g = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(10, 6, generator=g), torch.randint(0, 10, (2, 30), generator=g), torch.randn(10, 1, generator=g))
        for _ in range(10)
    ]
    return Case(C(), lambda m, b: F.mse_loss(m(b[0], b[1]), b[2]), adamw, data)


@case
def distributions_kl():
    class C(Net):
        def forward(self, x):
            h = self.a(x)
            q = torch.distributions.Normal(h[:, :4], F.softplus(h[:, 4:]) + 1e-3)
            p = torch.distributions.Normal(torch.zeros_like(q.loc), torch.ones_like(q.scale))
            return self.b(h), torch.distributions.kl_divergence(q, p).mean()

    def loss(m, b):
        out, kl = m(b[0])
        return F.mse_loss(out, b[1]) + 0.1 * kl

    return Case(C(), loss, adamw, batches())


@case
def torchmetrics_in_loss():
    import torchmetrics

    metric = torchmetrics.MeanMetric()

    def loss(m, b):
        base = mse(m, b)
        metric.update(base.detach())
        return base

    return Case(Net(), loss, adamw, batches(), observe=lambda: [float(metric.compute())])


@case
def python_reach():
    """A decorator, super(), getattr by name, an import inside, keywords, a generator, a context manager of the user."""

    def doubled(f):
        @functools.wraps(f)
        def g(*a, **k):
            return f(*a, **k) * 2

        return g

    @contextlib.contextmanager
    def scaled(m, s):
        m.beta = s
        try:
            yield
        finally:
            m.beta = 0.0

    class C(Net):
        def setup(self):
            self.scale0, self.scale1 = 0.5, 2.0

        @doubled
        def forward(self, x, *, level=0):
            import math as mathematics

            return super().forward(x) * getattr(self, f"scale{level}") * mathematics.sqrt(2) * (1 + self.beta)

    def loss(m, b):
        with scaled(m, 0.5):
            outs = [m(b[0], level=k) for k in (0, 1)]
        return sum(F.mse_loss(o, b[1]) for o in outs)

    return Case(C(), loss, adamw, batches())


@case
def spectral_and_weight_norm():
    torch.manual_seed(1)
    m = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)),
        nn.Tanh(),
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 1)),
    )
    return Case(m, mse, adamw, batches())


@case
def ties_and_corners():
    def loss(m, b):
        out = m(b[0].round())
        z = torch.zeros_like(out)
        return (
            torch.maximum(out * 0, z).sum()
            + out.abs().mean()
            + torch.relu(out - out.detach()).sum()
            + out.max()
            + (out * 0).norm()
        )

    return Case(Net(), loss, sgd, batches())


@case
def gan():
    torch.manual_seed(1)
    g, d = (
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6)),
        nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)),
    )
    draw = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, 6, generator=draw), torch.randn(8, 4, generator=draw)) for _ in range(12)]

    def d_loss(g, d, b):
        fake = g(b[1]).detach()
        return F.softplus(-d(b[0])).mean() + F.softplus(d(fake)).mean()

    def g_loss(g, d, b):
        return F.softplus(-d(g(b[1]))).mean()

    pairs = lambda m: [
        ("d", d_loss, torch.optim.Adam(m["d"].parameters(), 1e-2)),
        ("g", g_loss, torch.optim.Adam(m["g"].parameters(), 1e-2)),
    ]
    return Case({"g": g, "d": d}, None, pairs, data)
