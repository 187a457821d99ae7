"""Time series: temporal fusion, TimesNet, N-BEATS, DeepAR, patches, state spaces."""

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.public_trainings import Training, adam, one, training

PAST, AHEAD = 12, 4


def series(count: int, wide: int = 3) -> torch.Tensor:
    time = torch.arange(PAST + AHEAD)[None, :, None] * (0.3 + torch.rand(count, 1, wide))
    return torch.sin(time) + 0.1 * torch.randn(count, PAST + AHEAD, wide)


class Gated(nn.Module):
    """Gated residual network."""

    def __init__(self, a: int, b: int, context: int = 0):
        super().__init__()
        self.skip = nn.Linear(a, b) if a != b else nn.Identity()
        self.first, self.second, self.gate = nn.Linear(a, b), nn.Linear(b, b), nn.Linear(b, 2 * b)
        self.context, self.norm = (nn.Linear(context, b, bias=False) if context else None), nn.LayerNorm(b)

    def forward(self, x, context=None):
        y = self.first(x)
        if self.context is not None and context is not None:
            y = y + self.context(context)
        return self.norm(self.skip(x) + F.glu(self.gate(self.second(F.elu(y))), -1))


class Selection(nn.Module):
    """Variable selection: one gated network for each column, weighted by a softmax over the columns."""

    def __init__(self, columns: int, wide: int):
        super().__init__()
        self.each = nn.ModuleDict({f"x{i}": Gated(1, wide) for i in range(columns)})
        self.weights = Gated(columns, columns, wide)

    def forward(self, x, context):
        made = torch.stack([self.each[f"x{i}"](x[..., i : i + 1]) for i in range(x.shape[-1])], -1)
        weights = self.weights(x, context).softmax(-1)
        return (made * weights[..., None, :]).sum(-1), weights


@training("temporal fusion transformer", "variable selection, LSTM, interpretable attention, quantile loss")
def tft() -> Training:
    class Net(nn.Module):
        def __init__(self, wide: int = 12, columns: int = 3):
            super().__init__()
            self.static, self.past, self.known = nn.Embedding(4, wide), Selection(columns, wide), Selection(1, wide)
            self.begin = nn.ModuleList(Gated(wide, wide) for _ in range(2))
            self.encoder, self.decoder = (nn.LSTM(wide, wide, batch_first=True) for _ in range(2))
            self.enrich = Gated(wide, wide, wide)
            self.query, self.key, self.value = (
                nn.Linear(wide, 2 * wide),
                nn.Linear(wide, 2 * wide),
                nn.Linear(wide, wide),
            )
            self.join, self.out = Gated(wide, wide), nn.Linear(wide, 3)

        def forward(self, x, entity):
            static = self.static(entity)
            past, weights = self.past(x[:, :PAST], static[:, None])
            ahead, _ = self.known(x[:, PAST:, :1], static[:, None])
            state = tuple(gate(static)[None].contiguous() for gate in self.begin)
            past, state = self.encoder(past, state)
            ahead, _ = self.decoder(ahead, state)
            y = self.enrich(torch.cat([past, ahead], 1), static[:, None])
            q, k = (f(y).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.query, self.key))
            mask = torch.ones(y.shape[1], y.shape[1]).triu(1).bool()
            scores = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).masked_fill(mask, -1e9).softmax(-1)
            y = self.join(y + scores.mean(1) @ self.value(y))
            return self.out(y[:, PAST:]), weights

    quantiles = torch.tensor([0.1, 0.5, 0.9])

    def loss(m, batch):
        made, _ = m(*batch)
        gap = batch[0][:, PAST:, :1] - made
        return torch.maximum((quantiles - 1) * gap, quantiles * gap).sum(-1).mean()

    return one(Net(), loss, [(series(4), torch.randint(0, 4, (4,))) for _ in range(2)])


@training("TimesNet", "periods by FFT that change with the data, 2-D convolutions over them")
def timesnet() -> Training:
    class Net(nn.Module):
        def __init__(self, wide: int = 8):
            super().__init__()
            self.inp, self.length = nn.Linear(3, wide), nn.Linear(PAST, PAST + AHEAD)
            self.conv = nn.Sequential(nn.Conv2d(wide, wide, 3, 1, 1), nn.GELU(), nn.Conv2d(wide, wide, 3, 1, 1))
            self.norm, self.out = nn.LayerNorm(wide), nn.Linear(wide, 3)

        def block(self, x):
            rows, steps, wide = x.shape
            spectrum = torch.fft.rfft(x, dim=1).abs()
            mean = spectrum.mean(0).mean(-1)
            mean[0] = 0
            top = torch.topk(mean, 2)[1].detach().cpu().numpy()
            weights, made = spectrum.mean(-1)[:, top].softmax(1), []
            for period in steps // top:
                length = -(-steps // period) * period
                y = F.pad(x, (0, 0, 0, int(length - steps)))
                y = y.reshape(rows, int(length // period), int(period), wide).permute(0, 3, 1, 2).contiguous()
                made.append(self.conv(y).permute(0, 2, 3, 1).reshape(rows, -1, wide)[:, :steps])
            return (torch.stack(made, -1) * weights[:, None, None]).sum(-1) + x

        def forward(self, x):
            mean, spread = x.mean(1, keepdim=True).detach(), torch.sqrt(x.var(1, keepdim=True, unbiased=False) + 1e-5)
            y = self.length(self.inp((x - mean) / spread).transpose(1, 2)).transpose(1, 2)
            return self.out(self.norm(self.block(y)))[:, -AHEAD:] * spread + mean

    return one(Net(), lambda m, x: F.mse_loss(m(x[:, :PAST]), x[:, PAST:]), [series(4) for _ in range(4)])


@training("N-BEATS", "blocks that subtract their backcast, polynomial and Fourier bases")
def nbeats() -> Training:
    time = torch.arange(PAST + AHEAD) / PAST
    trend = torch.stack([time**k for k in range(3)])
    season = torch.cat([f(6.28 * k * time)[None] for k in (1, 2) for f in (torch.sin, torch.cos)])

    class Block(nn.Module):
        def __init__(self, basis):
            super().__init__()
            self.body = nn.Sequential(
                nn.Linear(PAST, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, len(basis))
            )
            self.register_buffer("basis", basis)

        def forward(self, x):
            return (self.body(x) @ self.basis).split([PAST, AHEAD], 1)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block(basis) for basis in (trend, trend, season))

        def forward(self, x):
            total = torch.zeros(len(x), AHEAD)
            for block in self.blocks:
                back, ahead = block(x)
                x, total = x - back, total + ahead
            return total

    def loss(m, x):
        made, wanted = m(x[:, :PAST, 0]), x[:, PAST:, 0]
        return (200 * (made - wanted).abs() / (made.abs() + wanted.abs() + 0.1)).mean() / 100

    return one(Net(), loss, [series(4) for _ in range(2)])


@training("DeepAR", "autoregressive LSTM, torch.distributions' log probability, scaled rows")
def deepar() -> Training:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.mean, self.spread = nn.LSTM(1, 12, 2, batch_first=True), nn.Linear(12, 1), nn.Linear(12, 1)

        def forward(self, x):
            y = self.lstm(x)[0]
            return torch.distributions.Normal(self.mean(y), F.softplus(self.spread(y)) + 1e-3, validate_args=False)

    def loss(m, x):
        x = x[..., :1] / (1 + x[:, :PAST, :1].abs().mean(1, keepdim=True))
        return -m(x[:, :-1]).log_prob(x[:, 1:]).mean()

    return one(Net(), loss, [series(4) for _ in range(2)])


@training("PatchTST", "patches by unfold, reversible normalisation, batch norm in the encoder")
def patchtst() -> Training:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.place = nn.Linear(4, 16), nn.Parameter(0.02 * torch.randn(5, 16))
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, activation="gelu")
            self.norm, self.out = nn.BatchNorm1d(16), nn.Linear(80, AHEAD)
            self.scale, self.shift = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))

        def forward(self, x):
            mean, spread = x.mean(1, keepdim=True).detach(), x.std(1, keepdim=True).detach() + 1e-5
            x = (x - mean) / spread * self.scale + self.shift
            patches = x.transpose(1, 2).flatten(0, 1).unfold(1, 4, 2)
            y = self.layer(self.inp(patches) + self.place)
            y = self.norm(y.transpose(1, 2)).flatten(1)
            y = self.out(y).view(len(x), 3, AHEAD).transpose(1, 2)
            return (y - self.shift) / (self.scale + 1e-10) * spread + mean

    return one(Net(), lambda m, x: F.mse_loss(m(x[:, :PAST]), x[:, PAST:]), [series(4) for _ in range(2)])


@training("S4D", "complex state space, kernel by FFT")
def s4d() -> Training:
    class Net(nn.Module):
        def __init__(self, wide: int = 6, states: int = 4):
            super().__init__()
            self.c, self.log_dt = nn.Parameter(torch.randn(wide, states, 2)), nn.Parameter(torch.rand(wide) - 3)
            self.log_real = nn.Parameter(torch.log(0.5 * torch.ones(wide, states)))
            self.imag = nn.Parameter(3.14 * torch.arange(states).float().repeat(wide, 1))
            self.d, self.inp, self.out = nn.Parameter(torch.randn(wide)), nn.Linear(3, wide), nn.Linear(wide, 3)

        def forward(self, x):
            u, n = self.inp(x).transpose(1, 2), x.shape[1]
            a = (-torch.exp(self.log_real) + 1j * self.imag) * torch.exp(self.log_dt)[:, None]
            c = torch.view_as_complex(self.c) * (torch.exp(a) - 1.0) / a
            kernel = 2 * torch.einsum("hn,hnl->hl", c, torch.exp(a[..., None] * torch.arange(n))).real
            y = torch.fft.irfft(torch.fft.rfft(u, 2 * n) * torch.fft.rfft(kernel, 2 * n), 2 * n)[..., :n]
            return self.out(F.gelu(y + u * self.d[:, None]).transpose(1, 2))

    module = Net()
    return one(module, lambda m, x: F.mse_loss(m(x[:, :-1]), x[:, 1:]), [series(4) for _ in range(2)], adam(module))
