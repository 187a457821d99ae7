"""Small models written with torch.nn alone."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.e2e.architectures import Architecture


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 12),
            nn.BatchNorm1d(12),
            nn.ReLU(),
            nn.Dropout(0.0),
            nn.Linear(12, 8),
            nn.GELU(),
            nn.Linear(8, 3),
        )

    def forward(self, x):
        return self.layers(x)


class ConvNet(nn.Module):
    """Every rank of convolution, pooling of each kind, GroupNorm and InstanceNorm."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding="same", padding_mode="reflect")
        self.norm = nn.GroupNorm(2, 8)
        self.depthwise = nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=8, bias=False)
        self.instance = nn.InstanceNorm2d(8, affine=True)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True)
        self.head = nn.Conv1d(8, 4, 3, dilation=2, padding=2)

    def forward(self, x):
        x = self.pool(F.silu(self.norm(self.conv(x))))
        x = F.hardswish(self.instance(self.depthwise(x)))
        x = torch.cat([F.adaptive_avg_pool2d(x, (3, 2)), F.adaptive_max_pool2d(x, (3, 2))], dim=-1)
        return self.head(x.flatten(2)).mean(-1)


class UNet(nn.Module):
    """Two levels, skip connections, transposed convolution up and bilinear up, BatchNorm."""

    def __init__(self):
        super().__init__()
        self.down1 = self._block(2, 4)
        self.down2 = self._block(4, 8)
        self.bottom = self._block(8, 8)
        self.up2 = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.merge2 = self._block(16, 4)
        self.merge1 = self._block(8, 4)
        self.out = nn.Conv2d(4, 1, 1)

    @staticmethod
    def _block(inputs, outputs):
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.LeakyReLU(0.1))

    def forward(self, x):
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        x = self.up2(self.bottom(F.avg_pool2d(second, 2)))
        x = self.merge2(torch.cat([x, second], 1))
        x = F.interpolate(x, size=first.shape[-2:], mode="bilinear", align_corners=False)
        return self.out(self.merge1(torch.cat([x, first], 1)))


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=0)
        self.rnn = kind(6, 5, num_layers=2, batch_first=True, bidirectional=True, **options)
        self.head = nn.Linear(options.get("proj_size", 5) * 2, 3)

    def forward(self, tokens):
        states, last = self.rnn(self.embed(tokens))
        last = last[0] if isinstance(last, tuple) else last
        return self.head(states.max(1).values), last


class CellLoop(nn.Module):
    """Cells called in a Python loop over time."""

    def __init__(self):
        super().__init__()
        self.gru, self.lstm = nn.GRUCell(3, 4), nn.LSTMCell(4, 4)

    def forward(self, x):
        hidden = x.new_zeros(x.shape[0], 4)
        cell = (hidden, hidden)
        for time in range(3):
            hidden = self.gru(x[:, time], hidden)
            cell = self.lstm(hidden, cell)
        return torch.stack(cell)


class SetTransformer(nn.Module):
    """Induced set attention and pooling by a learned seed. Source: Lee et al. 2019."""

    def __init__(self, width=8):
        super().__init__()
        self.project = nn.Linear(3, width)
        self.inducing = nn.Parameter(torch.randn(4, width))
        self.seed = nn.Parameter(torch.randn(1, width))
        self.down = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up = nn.MultiheadAttention(width, 2, batch_first=True)
        self.pool = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.LayerNorm(width)

    def forward(self, x, padding):
        x = self.project(x)
        batch = x.shape[0]
        small, _ = self.down(self.inducing.expand(batch, -1, -1), x, x, key_padding_mask=padding)
        x = self.norm(x + self.up(x, small, small, need_weights=False)[0])
        pooled, weights = self.pool(self.seed.expand(batch, -1, -1), x, x, key_padding_mask=padding)
        return pooled.squeeze(1), weights


class Seq2Seq(nn.Module):
    """nn.Transformer with a causal decoder and padded source."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        y = self.transformer(
            self.embed(source),
            self.embed(target),
            tgt_mask=mask,
            tgt_is_causal=True,
            src_key_padding_mask=source == 0,
            memory_key_padding_mask=source == 0,
        )
        return y @ self.embed.weight.T


class Volume(nn.Module):
    """3-d convolutions, there and back."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Conv3d(1, 4, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm3d(4)
        self.decode = nn.ConvTranspose3d(4, 1, 3, stride=2, padding=1, output_padding=1, groups=1)

    def forward(self, x):
        y = F.elu(self.norm(self.encode(x)))
        return self.decode(y), F.avg_pool3d(y, 2), F.interpolate(y, scale_factor=2, mode="trilinear")


class WaveNet(nn.Module):
    """Gated dilated causal convolutions on raw sound, with weight normalisation."""

    def __init__(self):
        super().__init__()
        self.start = nn.Conv1d(1, 4, 1)
        conv = [nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 8, 2, dilation=2**i)) for i in range(3)]
        self.convs = nn.ModuleList(conv)
        self.skip = nn.ModuleList(nn.Conv1d(4, 3, 1) for _ in range(3))

    def forward(self, x):
        x, total = self.start(x), 0
        for index, (conv, skip) in enumerate(zip(self.convs, self.skip, strict=True)):
            gate, value = conv(F.pad(x, (2**index, 0))).chunk(2, dim=1)
            y = torch.tanh(value) * torch.sigmoid(gate)
            total = total + skip(y)
            x = x + y
        return total


class GraphNet(nn.Module):
    """Messages along edges, summed and maximised at the nodes by scatter."""

    def __init__(self):
        super().__init__()
        self.message, self.update = nn.Linear(8, 6), nn.Linear(10, 4)

    def forward(self, nodes, edges):
        source, target = edges[0], edges[1]
        messages = F.relu(self.message(torch.cat([nodes[source], nodes[target]], -1)))
        gathered = torch.zeros(nodes.shape[0], 6).index_add(0, target, messages)
        index = target[:, None].expand_as(messages)
        highest = torch.zeros(nodes.shape[0], 6).scatter_reduce(0, index, messages, "amax", include_self=False)
        count = torch.zeros(nodes.shape[0]).scatter_add(0, target, torch.ones_like(target, dtype=torch.float))
        mean = gathered / count.clamp(min=1)[:, None]
        return self.update(torch.cat([nodes, mean], -1)), highest


class Experts(nn.Module):
    """A mixture of experts: top-2 routing, computed densely, with a straight-through choice and a load loss."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(6, 4)
        self.experts = nn.Parameter(torch.randn(4, 6, 6) / 3)

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        values, chosen = scores.topk(2, dim=-1)
        gates = torch.zeros_like(scores).scatter(-1, chosen, values / values.sum(-1, keepdim=True))
        y = torch.einsum("bte,eij,btj->bti", gates, self.experts, x)
        hard = F.one_hot(scores.argmax(-1), 4).float() + scores - scores.detach()
        with torch.no_grad():
            load = hard.mean((0, 1))
        return y, (hard * load).sum(-1)


class Autoencoder(nn.Module):
    """A variational autoencoder's mean path, with the KL term; in-place updates and masks on the way."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 4), nn.Linear(2, 6)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6))

    def forward(self, x):
        mean, log_var = self.encode(x * self.scale).chunk(2, dim=-1)
        z = mean.clone()
        z[:, 0] *= 2
        z.masked_fill_(z < -1, -1.0)
        kl = -0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).sum(-1)
        return {"reconstruction": torch.sigmoid(self.decode(z)), "kl": kl}


class Recommender(nn.Module):
    """Tables of features, dot-product interactions of their upper triangle, as in DLRM."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleDict({"user": nn.Embedding(7, 4), "item": nn.Embedding(9, 4)})
        self.dense = nn.Linear(5, 4)
        self.top = nn.Linear(4 + 3, 1)

    def forward(self, user, item, dense):
        parts = torch.stack([self.tables["user"](user), self.tables["item"](item), self.dense(dense)], 1)
        products = parts @ parts.transpose(1, 2)
        row, column = torch.triu_indices(3, 3, offset=1)
        return self.top(torch.cat([parts[:, 2], products[:, row, column]], -1)).squeeze(-1)


class Spectral(nn.Module):
    """A Fourier layer: weights on the lowest frequencies. Source: Li et al. 2021."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, 4, 2) / 3)
        self.local = nn.Conv1d(3, 3, 1)

    def forward(self, x):
        spectrum = torch.fft.rfft(x)[..., :4]
        mixed = torch.einsum("bif,oif->bof", spectrum, torch.view_as_complex(self.weight))
        return F.gelu(torch.fft.irfft(mixed, n=x.shape[-1]) + self.local(x))


class Tied(nn.Module):
    """A language model whose head is its embedding, and a layer used twice."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.block = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True, activation="gelu")
        self.again = self.block
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.again(self.block(self.embed(tokens))))


def _ids(*shape, high=9):
    return torch.randint(1, high, shape)


ARCHITECTURES = [
    Architecture("MLP, BatchNorm1d", "torch.nn", lambda: (MLP(), torch.randn(5, 6)), training=True),
    Architecture("Conv net, GroupNorm", "torch.nn", lambda: (ConvNet(), torch.randn(2, 3, 15, 14))),
    Architecture("U-Net", "torch.nn", lambda: (UNet(), torch.randn(2, 2, 12, 8)), training=True),
    Architecture("3-d conv autoencoder", "torch.nn", lambda: (Volume(), torch.randn(2, 1, 8, 6, 8)), training=True),
    Architecture("WaveNet, weight_norm", "torch.nn", lambda: (WaveNet(), torch.randn(2, 1, 20))),
    Architecture("LSTM, bidirectional", "torch.nn", lambda: (Recurrent(nn.LSTM), _ids(3, 7))),
    Architecture("LSTM, projected", "torch.nn", lambda: (Recurrent(nn.LSTM, proj_size=3), _ids(3, 7))),
    Architecture("GRU, bidirectional", "torch.nn", lambda: (Recurrent(nn.GRU), _ids(3, 7))),
    Architecture("RNN, relu", "torch.nn", lambda: (Recurrent(nn.RNN, nonlinearity="relu"), _ids(3, 7))),
    Architecture("GRUCell and LSTMCell", "torch.nn", lambda: (CellLoop(), torch.randn(4, 3, 3))),
    Architecture(
        "Set transformer",
        "torch.nn",
        lambda: (SetTransformer(), (torch.randn(3, 5, 3), torch.arange(5) >= torch.tensor([[5], [3], [4]]))),
    ),
    Architecture("nn.Transformer", "torch.nn", lambda: (Seq2Seq(), (_ids(2, 6), _ids(2, 5)))),
    Architecture("Tied language model", "torch.nn", lambda: (Tied(), _ids(2, 6))),
    Architecture("Graph network", "torch.nn", lambda: (GraphNet(), (torch.randn(6, 4), torch.randint(0, 6, (2, 11))))),
    Architecture("Mixture of experts", "torch.nn", lambda: (Experts(), torch.randn(2, 5, 6))),
    Architecture("Variational autoencoder", "torch.nn", lambda: (Autoencoder(), torch.randn(5, 6))),
    Architecture("DLRM", "torch.nn", lambda: (Recommender(), (_ids(4, high=7), _ids(4), torch.randn(4, 5)))),
    Architecture("Fourier neural operator", "torch.nn", lambda: (Spectral(), torch.randn(2, 3, 16))),
]
