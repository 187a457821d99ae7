"""Sequences of sound: CTC, transducers, Tacotron, FastSpeech, VITS."""

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.public_trainings import Training, one, training

LETTERS = 7


@training("CTC", "convolutions and BiLSTM, lengths per row, torch's ctc_loss")
def ctc() -> Training:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.lstm = nn.Conv1d(10, 16, 3, 2, 1), nn.LSTM(16, 12, bidirectional=True, batch_first=True)
            self.out = nn.Linear(24, LETTERS)

        def forward(self, x):
            return self.out(self.lstm(F.gelu(self.conv(x)).transpose(1, 2))[0]).log_softmax(-1).transpose(0, 1)

    def loss(m, batch):
        sound, text, frames, letters = batch
        return F.ctc_loss(m(sound), text, frames, letters, zero_infinity=True)

    def batch():
        lengths = torch.tensor([8, 6, 7]), torch.tensor([3, 2, 3])
        return torch.randn(3, 10, 16), torch.randint(1, LETTERS, (3, 3)), *lengths

    return one(Net(), loss, [batch() for _ in range(2)])


@training("RNN transducer", "joint network, forward variables over frames and letters")
def transducer() -> Training:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.words = nn.GRU(6, 12, batch_first=True), nn.Embedding(LETTERS, 8)
            self.predictor, self.joint = nn.GRU(8, 12, batch_first=True), nn.Linear(12, LETTERS)

        def forward(self, sound, text):
            frames = self.encoder(sound)[0]
            words = self.predictor(self.words(F.pad(text, (1, 0))))[0]
            return self.joint(torch.tanh(frames[:, :, None] + words[:, None])).log_softmax(-1)

    def loss(m, batch):
        sound, text = batch
        scores = m(sound, text)
        blank, letters = (
            scores[..., 0],
            scores[:, :, :-1].gather(3, text[:, None, :, None].expand(-1, scores.shape[1], -1, 1)),
        )
        letters, frames, count = letters.squeeze(3), scores.shape[1], text.shape[1]
        alpha: list[list[torch.Tensor]] = [[torch.zeros(len(text))]]
        for t in range(frames):
            if t:
                alpha.append([alpha[t - 1][0] + blank[:, t - 1, 0]])
            for u in range(1, count + 1):
                emitted = alpha[t][u - 1] + letters[:, t, u - 1]
                alpha[t].append(torch.logaddexp(alpha[t - 1][u] + blank[:, t - 1, u], emitted) if t else emitted)
        return -(alpha[-1][count] + blank[:, -1, count]).mean()

    return one(Net(), loss, [(torch.randn(3, 5, 6), torch.randint(1, LETTERS, (3, 3))) for _ in range(2)])


@training("Tacotron", "attention that sees its past weights, stop token, frames masked by length, guided attention")
def tacotron() -> Training:
    class Net(nn.Module):
        def __init__(self, wide: int = 12, bands: int = 5):
            super().__init__()
            self.words, self.encoder = nn.Embedding(LETTERS, wide), nn.Conv1d(wide, wide, 3, 1, 1)
            self.prenet, self.cell = nn.Linear(bands, wide), nn.LSTMCell(2 * wide, wide)
            self.seen, self.asked = nn.Linear(wide, wide), nn.Linear(wide, wide)
            self.past, self.score = nn.Conv1d(2, wide, 3, 1, 1), nn.Linear(wide, 1)
            self.out, self.stop = nn.Linear(2 * wide, bands), nn.Linear(2 * wide, 1)
            self.postnet = nn.Sequential(
                nn.Conv1d(bands, 8, 3, 1, 1), nn.BatchNorm1d(8), nn.Tanh(), nn.Conv1d(8, bands, 3, 1, 1)
            )

        def forward(self, text, mel):
            memory = torch.relu(self.encoder(self.words(text).transpose(1, 2))).transpose(1, 2)
            keys, mask = self.seen(memory), text == 0
            h = c = context = torch.zeros(len(text), memory.shape[2])
            weights = total = torch.zeros(text.shape)
            frames, stops, alphas, frame = [], [], [], torch.zeros(len(text), mel.shape[2])
            for t in range(mel.shape[1]):
                h, c = self.cell(torch.cat([torch.relu(self.prenet(frame)), context], 1), (h, c))
                past = self.past(torch.stack([weights, total], 1)).transpose(1, 2)
                scores = self.score(torch.tanh(keys + self.asked(h)[:, None] + past)).squeeze(2)
                weights = scores.masked_fill(mask, -1e9).softmax(1)
                total, context = total + weights, torch.bmm(weights[:, None], memory).squeeze(1)
                both = torch.cat([h, context], 1)
                frames.append(self.out(both))
                stops.append(self.stop(both).squeeze(1))
                alphas.append(weights)
                frame = mel[:, t]
            made = torch.stack(frames, 1)
            return (
                made,
                made + self.postnet(made.transpose(1, 2)).transpose(1, 2),
                torch.stack(stops, 1),
                torch.stack(alphas, 1),
            )

    def loss(m, batch):
        text, mel, lengths = batch
        before, after, stop, alphas = m(text, mel)
        valid = torch.arange(mel.shape[1]) < lengths[:, None]
        ended = (torch.arange(mel.shape[1]) >= lengths[:, None] - 1).float()
        count = valid.sum() * mel.shape[2]
        near = sum((((x - mel) ** 2) * valid[..., None]).sum() / count for x in (before, after))
        i, j = torch.arange(mel.shape[1])[:, None] / lengths[:, None, None], torch.arange(text.shape[1]) / text.shape[1]
        guide = 1 - torch.exp(-((i - j) ** 2) / 0.08)
        return near + F.binary_cross_entropy_with_logits(stop, ended) + (alphas * guide * valid[..., None]).mean()

    def batch(lengths):
        text = torch.randint(1, LETTERS, (3, 5))
        text[1, 3:] = 0
        return text, torch.randn(3, max(lengths), 5), torch.tensor(lengths)

    return one(Net(), loss, [batch([6, 4, 5]), batch([6, 6, 2])])


@training("FastSpeech", "letters repeated by durations, log durations, masks; shapes depend on data")
def fastspeech() -> Training:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.duration = nn.Embedding(LETTERS, 12), nn.Linear(12, 1)
            self.body, self.out = nn.Conv1d(12, 12, 3, 1, 1), nn.Linear(12, 5)

        def forward(self, text, durations):
            x = self.words(text)
            rows = [row.repeat_interleave(n, 0) for row, n in zip(x, durations, strict=True)]
            long = nn.utils.rnn.pad_sequence(rows, batch_first=True)
            return self.out(torch.relu(self.body(long.transpose(1, 2))).transpose(1, 2)), self.duration(x).squeeze(2)

    def loss(m, batch):
        text, durations, mel = batch
        made, told = m(text, durations)
        valid = torch.arange(made.shape[1]) < durations.sum(1)[:, None]
        near = F.l1_loss(made[valid], mel[:, : made.shape[1]][valid])
        return near + F.mse_loss(told, torch.log1p(durations.float()))

    def batch():
        return torch.randint(0, LETTERS, (3, 4)), torch.randint(1, 4, (3, 4)), torch.randn(3, 12, 5)

    return one(Net(), loss, [batch() for _ in range(3)])


@training("VITS", "posterior and coupling flow, slices by random starts, adversary with feature matching")
def vits() -> Training:
    class Voice(nn.Module):
        def __init__(self):
            super().__init__()
            self.posterior, self.prior = nn.Conv1d(5, 8, 3, 1, 1), nn.Conv1d(6, 8, 3, 1, 1)
            self.coupling = nn.Conv1d(2, 4, 3, 1, 1)
            self.decoder = nn.Sequential(
                nn.ConvTranspose1d(4, 8, 4, 2, 1), nn.LeakyReLU(0.1), nn.Conv1d(8, 1, 3, 1, 1), nn.Tanh()
            )

        def forward(self, mel, text, noise, starts):
            mean, log_s = self.posterior(mel).chunk(2, 1)
            z = mean + noise * torch.exp(log_s)
            a, b = z.chunk(2, 1)
            shift, scale = self.coupling(a).chunk(2, 1)
            moved = torch.cat([a, shift + b * torch.exp(scale)], 1)
            prior, log_p = self.prior(text).chunk(2, 1)
            kl = log_p - log_s - 0.5 + 0.5 * (moved - prior) ** 2 * torch.exp(-2 * log_p) - scale.repeat(1, 2, 1)
            pieces = torch.stack([row[:, s : s + 4] for row, s in zip(z, starts, strict=True)])
            return self.decoder(pieces), kl.mean()

    class Judge(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Conv1d(1, 6, 3, 2, 1), nn.Conv1d(6, 6, 3, 2, 1), nn.Conv1d(6, 1, 2)])

        def forward(self, x):
            maps = []
            for layer in self.layers:
                x = F.leaky_relu(layer(x), 0.1)
                maps.append(x)
            return x, maps

    def judge_loss(voice, judge, batch):
        mel, text, noise, starts, wave = batch
        made = voice(mel, text, noise, starts)[0].detach()
        return ((1 - judge(wave)[0]) ** 2).mean() + (judge(made)[0] ** 2).mean()

    def voice_loss(voice, judge, batch):
        mel, text, noise, starts, wave = batch
        made, kl = voice(mel, text, noise, starts)
        (fake, maps), (_, real) = judge(made), judge(wave)
        matching = sum(F.l1_loss(a, b.detach()) for a, b in zip(maps, real, strict=True))
        return ((1 - fake) ** 2).mean() + 2 * matching + kl + 45 * F.l1_loss(made, wave)

    voice, judge = Voice(), Judge()
    make = lambda: (torch.randn(3, 5, 8), torch.randn(3, 6, 8), torch.randn(3, 4, 8), [0, 2, 4], torch.rand(3, 1, 8))
    optimizers = {
        n: torch.optim.AdamW(m.parameters(), 2e-4, betas=(0.8, 0.99)) for n, m in (("d", judge), ("g", voice))
    }
    modules, losses = {"voice": voice, "judge": judge}, {"d": judge_loss, "g": voice_loss}
    return Training(modules, losses, optimizers, [make() for _ in range(2)])
