# ruff: noqa: E501  # tables of settings read better in whole lines
"""Speech and time series."""

import torch
import transformers
from torch import nn
from torch.nn import functional as F

from tests.chaos.trainings import Training, Update, one, repeated, training


@training("NVIDIA/tacotron2: location-sensitive attention, stop tokens, masked frames")
def tacotron():
    torch.manual_seed(0)

    class Tacotron(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(30, 16)
            self.conv = nn.Sequential(nn.Conv1d(16, 16, 5, padding=2), nn.BatchNorm1d(16), nn.ReLU())
            self.encoder = nn.LSTM(16, 8, batch_first=True, bidirectional=True)
            self.prenet, self.cell = nn.Linear(8, 12), nn.LSTMCell(12 + 16, 20)
            self.query, self.memory, self.v = nn.Linear(20, 12), nn.Linear(16, 12), nn.Linear(12, 1)
            self.location, self.place = nn.Conv1d(2, 4, 5, padding=2, bias=False), nn.Linear(4, 12, bias=False)
            self.frame, self.gate = nn.Linear(36, 8), nn.Linear(36, 1)
            self.postnet = nn.Sequential(nn.Conv1d(8, 8, 5, padding=2), nn.BatchNorm1d(8))

        def forward(self, text, lengths, mel):
            memory, _ = self.encoder(self.conv(self.embedding(text).transpose(1, 2)).transpose(1, 2))
            hidden_keys = torch.arange(text.size(1)) >= lengths[:, None]
            batch, steps = len(text), mel.size(2)
            h, c, context = memory.new_zeros(batch, 20), memory.new_zeros(batch, 20), memory.new_zeros(batch, 16)
            weights = total = memory.new_zeros(batch, text.size(1))
            before = torch.cat([mel.new_zeros(batch, 8, 1), mel[:, :, :-1]], 2)
            frames, gates, keys = [], [], self.memory(memory)
            for t in range(steps):
                h, c = self.cell(torch.cat([torch.relu(self.prenet(before[:, :, t])), context], -1), (h, c))
                where = self.place(self.location(torch.stack([weights, total], 1)).transpose(1, 2))
                energy = self.v(torch.tanh(self.query(h).unsqueeze(1) + where + keys)).squeeze(-1)
                weights = F.softmax(energy.masked_fill(hidden_keys, -float("inf")), dim=1)
                context, total = torch.bmm(weights.unsqueeze(1), memory).squeeze(1), total + weights
                both = torch.cat([h, context], 1)
                frames.append(self.frame(both))
                gates.append(self.gate(both))
            mel_out = torch.stack(frames, 2)
            return mel_out, mel_out + self.postnet(mel_out), torch.cat(gates, 1)

    def loss(model, batch):
        text, lengths, mel, frames = batch
        first, last, gate = model(text, lengths, mel)
        padding = torch.arange(mel.size(2)) >= frames[:, None]
        first, last = (x.masked_fill(padding[:, None], 0.0) for x in (first, last))
        gate = gate.masked_fill(padding, 1e3)
        wanted = (torch.arange(mel.size(2)) >= frames[:, None] - 1).float()
        gate_loss = F.binary_cross_entropy_with_logits(gate.view(-1, 1), wanted.view(-1, 1))
        return F.mse_loss(first, mel) + F.mse_loss(last, mel) + gate_loss

    def batch(g):
        frames = torch.randint(6, 11, (3,), generator=g)
        mel = torch.randn(3, 8, 10, generator=g) * (torch.arange(10) < frames[:, None])[:, None]
        return torch.randint(1, 30, (3, 7), generator=g), torch.tensor([7, 6, 4]), mel, frames

    return one(Tacotron(), loss, repeated(batch))


@training("jaywalnut310/vits: posterior, flow, prior of aligned text, adversary with feature matching; two optimizers")
def vits():
    torch.manual_seed(0)

    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.text, self.stats = nn.Embedding(20, 16), nn.Conv1d(16, 16, 1)
            self.posterior = nn.Conv1d(10, 16, 3, padding=1)
            self.coupling = nn.ModuleList(
                nn.Sequential(nn.Conv1d(4, 16, 3, padding=1), nn.Tanh(), nn.Conv1d(16, 4, 3, padding=1))
                for _ in range(2)
            )
            self.decoder = nn.ConvTranspose1d(8, 1, 4, stride=4)

        def forward(self, text, frames, spec, noise):
            mask = (torch.arange(spec.size(2)) < frames[:, None]).float()[:, None]
            mean, log_std = (self.posterior(spec) * mask).chunk(2, 1)
            z = (mean + noise * torch.exp(log_std)) * mask
            flow = z
            for layer in self.coupling:
                half, rest = flow.chunk(2, 1)
                flow = torch.cat([rest + layer(half) * mask, half], 1)
            text_mean, text_log_std = self.stats(self.text(text).transpose(1, 2)).chunk(2, 1)
            with torch.no_grad():
                inverse = torch.exp(-2 * text_log_std)
                likelihood = -0.5 * torch.matmul((flow**2).transpose(1, 2), inverse) + torch.matmul(
                    flow.transpose(1, 2), text_mean * inverse
                )
                path = F.one_hot(likelihood.argmax(-1), text.size(1)).float().transpose(1, 2)
            prior_mean, prior_log_std = text_mean @ path, text_log_std @ path
            kl = prior_log_std - log_std - 0.5 + 0.5 * ((flow - prior_mean) ** 2) * torch.exp(-2.0 * prior_log_std)
            return self.decoder(z), (kl * mask).sum() / mask.sum()

    class Discriminator(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Conv1d(1, 8, 5, 2, 2), nn.Conv1d(8, 8, 5, 2, 2)])
            self.out = nn.Conv1d(8, 1, 3, padding=1)

        def forward(self, x):
            maps = []
            for layer in self.layers:
                x = F.leaky_relu(layer(x), 0.1)
                maps.append(x)
            return self.out(x), maps

    def of_discriminator(generator, discriminator, batch):
        *inputs, wave = batch
        fake = generator(*inputs)[0].detach()
        return ((1 - discriminator(wave)[0]) ** 2).mean() + (discriminator(fake)[0] ** 2).mean()

    def of_generator(generator, discriminator, batch):
        *inputs, wave = batch
        fake, kl = generator(*inputs)
        score, maps = discriminator(fake)
        _, real = discriminator(wave)
        match = sum((a.detach() - b).abs().mean() for a, b in zip(real, maps, strict=True))
        return ((1 - score) ** 2).mean() + 2 * match + kl + 45 * F.l1_loss(fake, wave)

    def batch(g):
        frames = torch.randint(8, 13, (3,), generator=g)
        spec, noise = torch.randn(3, 10, 12, generator=g), torch.randn(3, 8, 12, generator=g)
        return torch.randint(20, (3, 6), generator=g), frames, spec, noise, torch.randn(3, 1, 48, generator=g)

    generator, discriminator = Generator(), Discriminator()
    adam = lambda module: torch.optim.AdamW(module.parameters(), 2e-4, betas=(0.8, 0.99), eps=1e-9)
    updates = {
        "discriminator": Update(of_discriminator, adam(discriminator)),
        "generator": Update(of_generator, adam(generator)),
    }
    return Training({"generator": generator, "discriminator": discriminator}, updates, repeated(batch))


@training("huggingface/transformers examples: wav2vec 2.0 with CTC")
def wav2vec_ctc():
    torch.manual_seed(0)
    off = dict.fromkeys(
        (
            "hidden_dropout",
            "attention_dropout",
            "activation_dropout",
            "feat_proj_dropout",
            "final_dropout",
            "layerdrop",
        ),
        0.0,
    )
    config = transformers.Wav2Vec2Config(
        vocab_size=8, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, conv_dim=(16, 16),
        conv_stride=(4, 2), conv_kernel=(8, 3), num_feat_extract_layers=2, num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2, apply_spec_augment=False, feat_extract_norm="layer", **off,
    )  # fmt: skip
    data = repeated(
        lambda g: {"input_values": torch.randn(3, 240, generator=g), "labels": torch.randint(1, 8, (3, 4), generator=g)}
    )
    return one(transformers.Wav2Vec2ForCTC(config), lambda model, batch: model(**batch).loss, data)


@training("pytorch/audio conformer RNN-T style: strided conv, CTC with lengths of each sample")
def ctc_with_lengths():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.rnn = nn.Conv1d(8, 16, 3, stride=2, padding=1), nn.GRU(16, 16, batch_first=True)
            self.out = nn.Linear(16, 10)

        def forward(self, x):
            return F.log_softmax(self.out(self.rnn(F.gelu(self.conv(x)).transpose(1, 2))[0]), -1)

    def loss(model, batch):
        x, frames, words, counts = batch
        return F.ctc_loss(model(x).transpose(0, 1), words, frames // 2, counts, zero_infinity=True)

    def batch(g):
        frames, counts = torch.randint(20, 31, (4,), generator=g), torch.randint(2, 6, (4,), generator=g)
        return torch.randn(4, 8, 30, generator=g), frames, torch.randint(1, 10, (4, 5), generator=g), counts

    return one(Net(), loss, repeated(batch))


@training("thuml/Time-Series-Library TimesNet: periods found by FFT change from batch to batch")
def times_net():
    torch.manual_seed(0)

    class TimesNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Linear(3, 8), nn.Linear(8, 3)
            self.conv = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 3, padding=1))

        def forward(self, x):
            x = self.embed(x)
            spectrum = torch.fft.rfft(x, dim=1)
            frequencies = abs(spectrum).mean(0).mean(-1)
            frequencies[0] = 0
            _, top = torch.topk(frequencies, 2)
            periods = x.shape[1] // top.detach().cpu().numpy()
            weights, results = abs(spectrum).mean(-1)[:, top], []
            for period in periods:
                length = -(-x.shape[1] // period) * period
                padded = torch.cat([x, torch.zeros(x.shape[0], length - x.shape[1], x.shape[2])], 1)
                grid = padded.reshape(x.shape[0], length // period, period, x.shape[2]).permute(0, 3, 1, 2)
                out = self.conv(grid).permute(0, 2, 3, 1).reshape(x.shape[0], -1, x.shape[2])
                results.append(out[:, : x.shape[1]])
            results = torch.stack(results, -1)
            weights = F.softmax(weights, 1)[:, None, None]
            return self.out((results * weights).sum(-1) + x)

    data = repeated(lambda g: torch.randn(2, 4, 24, 3, generator=g).unbind())
    return one(TimesNet(), lambda model, batch: F.mse_loss(model(batch[0]), batch[1]), data)


@training("sktime/pytorch-forecasting Temporal Fusion Transformer: gated residuals, variable selection, quantiles")
def temporal_fusion():
    torch.manual_seed(0)

    class Gated(nn.Module):
        def __init__(self, size, out=None):
            super().__init__()
            out = out or size
            self.first, self.second, self.gate = nn.Linear(size, size), nn.Linear(size, size), nn.Linear(size, 2 * out)
            self.skip, self.norm = nn.Linear(size, out), nn.LayerNorm(out)

        def forward(self, x):
            return self.norm(F.glu(self.gate(self.second(F.elu(self.first(x))))) + self.skip(x))

    class Fusion(nn.Module):
        def __init__(self):
            super().__init__()
            self.names = ["price", "sales", "month"]
            self.embed = nn.ModuleDict({name: nn.Linear(1, 8) for name in self.names})
            self.each = nn.ModuleDict({name: Gated(8) for name in self.names})
            self.weights = Gated(24, 3)
            self.lstm, self.attention = nn.LSTM(8, 8, batch_first=True), nn.MultiheadAttention(8, 2, batch_first=True)
            self.after, self.out = Gated(8), nn.Linear(8, 3)

        def forward(self, x):
            parts = {name: self.embed[name](x[name].unsqueeze(-1)) for name in self.names}
            weights = F.softmax(self.weights(torch.cat(list(parts.values()), -1)), -1).unsqueeze(-2)
            joined = torch.stack([self.each[name](part) for name, part in parts.items()], -1)
            h, _ = self.lstm((joined * weights).sum(-1))
            mask = torch.triu(torch.ones(h.shape[1], h.shape[1], dtype=torch.bool), 1)
            return self.out(self.after(h + self.attention(h, h, h, attn_mask=mask)[0])[:, -4:])

    def loss(model, batch):
        x, target = batch
        errors = target.unsqueeze(-1) - model(x)
        losses = [torch.max((q - 1) * errors[..., i], q * errors[..., i]) for i, q in enumerate((0.1, 0.5, 0.9))]
        return 2 * torch.stack(losses, -1).mean()

    def batch(g):
        return {name: torch.randn(4, 12, generator=g) for name in ("price", "sales", "month")}, torch.randn(
            4, 4, generator=g
        )

    return one(Fusion(), loss, repeated(batch))


@training("ServiceNow/N-BEATS: doubly residual stacks")
def n_beats():
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
            self.theta = nn.Linear(32, 8)
            time = torch.arange(25) / 25
            self.register_buffer("basis", torch.stack([time**i for i in range(4)]))

        def forward(self, x):
            back, ahead = self.theta(self.body(x)).chunk(2, -1)
            return back @ self.basis[:, :20], ahead @ self.basis[:, 20:]

    class NBeats(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x):
            forecast = x[:, -1:]
            for block in self.blocks:
                back, ahead = block(x)
                x, forecast = x - back, forecast + ahead
            return forecast

    def smape(model, batch):
        past, future = batch
        forecast = model(past)
        return 200 * ((future - forecast).abs() / (future.abs().detach() + forecast.abs().detach() + 1e-3)).mean()

    optimizer = lambda model: torch.optim.Adam(model.parameters(), 1e-4)
    model = NBeats()
    data = repeated(lambda g: (torch.rand(8, 20, generator=g) + 1, torch.rand(8, 5, generator=g) + 1))
    return Training({"model": model}, {"loss": Update(smape, optimizer(model))}, data)
