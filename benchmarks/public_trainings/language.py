"""Text: captioning, translation, language models, taggers, word vectors, mixtures of experts."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.public_trainings import Training, adam, one, training

WORDS = 23


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(1, WORDS, shape)


class Attention(nn.Module):
    """Bahdanau's attention: [rows, places, wide], [rows, state] -> [rows, wide] and weights."""

    def __init__(self, wide: int, state: int, inner: int = 12):
        super().__init__()
        self.seen, self.asked, self.score = nn.Linear(wide, inner), nn.Linear(state, inner), nn.Linear(inner, 1)

    def forward(self, places, state, mask=None):
        scores = self.score(torch.relu(self.seen(places) + self.asked(state)[:, None])).squeeze(2)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        weights = scores.softmax(1)
        return (places * weights[..., None]).sum(1), weights


class Captioner(nn.Module):
    """Show, attend and tell: rows sorted by length, each step decodes those that have not ended."""

    def __init__(self):
        super().__init__()
        self.attention, self.embedding = Attention(16, 16), nn.Embedding(WORDS, 16)
        self.cell, self.begin_h, self.begin_c = nn.LSTMCell(32, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.gate, self.out = nn.Linear(16, 16), nn.Linear(16, WORDS)

    def forward(self, regions, captions, lengths):
        lengths, order = lengths.sort(descending=True)
        regions, captions = regions[order], captions[order]
        embedded, mean = self.embedding(captions), regions.mean(1)
        h, c = self.begin_h(mean), self.begin_c(mean)
        decode = (lengths - 1).tolist()
        scores = torch.zeros(len(regions), max(decode), WORDS)
        alphas = torch.zeros(len(regions), max(decode), regions.shape[1])
        for t in range(max(decode)):
            rows = sum(n > t for n in decode)
            context, alpha = self.attention(regions[:rows], h[:rows])
            context = torch.sigmoid(self.gate(h[:rows])) * context
            h, c = self.cell(torch.cat([embedded[:rows, t], context], 1), (h[:rows], c[:rows]))
            scores[:rows, t], alphas[:rows, t] = self.out(h), alpha
        return scores, captions, decode, alphas


@training("captioning", "packed rows, fewer rows at each step, attention regularised")
def captioning() -> Training:
    def loss(module, batch):
        scores, captions, lengths, alphas = module(*batch)
        scores = pack_padded_sequence(scores, lengths, batch_first=True).data
        targets = pack_padded_sequence(captions[:, 1:], lengths, batch_first=True).data
        return F.cross_entropy(scores, targets) + ((1.0 - alphas.sum(1)) ** 2).mean()

    lengths = [[6, 5, 3, 3], [6, 4, 4, 2]]
    return one(Captioner(), loss, [(torch.randn(4, 5, 16), tokens(4, 6), torch.tensor(n)) for n in lengths])


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, 12, padding_idx=0), nn.Embedding(WORDS, 12, padding_idx=0)
        self.encoder = nn.GRU(12, 12, bidirectional=True, batch_first=True)
        self.bridge, self.attention = nn.Linear(24, 16), Attention(24, 16)
        self.decoder, self.out = nn.GRUCell(36, 16), nn.Linear(52, WORDS)

    def forward(self, source, lengths, target):
        packed = pack_padded_sequence(self.source(source), lengths, batch_first=True, enforce_sorted=False)
        states, last = self.encoder(packed)
        states, _ = pad_packed_sequence(states, batch_first=True)
        state = torch.tanh(self.bridge(torch.cat([last[0], last[1]], 1)))
        mask, scores = source[:, : states.shape[1]] != 0, []
        for t in range(target.shape[1] - 1):
            word = self.target(target[:, t])
            context, _ = self.attention(states, state, mask)
            state = self.decoder(torch.cat([word, context], 1), state)
            scores.append(self.out(torch.cat([state, context, word], 1)))
        return torch.stack(scores, 1)


@training("translation", "GRU encoder over packed rows, attention, teacher forcing")
def translation() -> Training:
    def batch(lengths):
        source = tokens(4, max(lengths))
        for row, n in enumerate(lengths):
            source[row, n:] = 0
        return source, torch.tensor(lengths), tokens(4, 5)

    def loss(module, batch):
        return F.cross_entropy(module(*batch).flatten(0, 1), batch[2][:, 1:].flatten(), ignore_index=0)

    return one(Translator(), loss, [batch([6, 3, 5, 2]), batch([4, 6, 6, 1])])


@training("word2vec", "skip-gram, negatives, embedding of row sums, SGD")
def word2vec() -> Training:
    class SkipGram(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Embedding(50, 16), nn.Embedding(50, 16)

        def forward(self, center, context, negative):
            v = self.inner(center)
            near = F.logsigmoid((v * self.outer(context)).sum(1))
            far = F.logsigmoid(-torch.bmm(self.outer(negative), v[:, :, None]).squeeze(2)).sum(1)
            return -(near + far).mean()

    module = SkipGram()
    batches = [tuple(torch.randint(0, 50, shape) for shape in ((16,), (16,), (16, 5))) for _ in range(3)]
    return one(module, lambda m, b: m(*b), batches, torch.optim.SGD(module.parameters(), lr=0.5))


class Block(nn.Module):
    def __init__(self, wide: int, heads: int):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(wide), nn.LayerNorm(wide)
        self.qkv, self.project = nn.Linear(wide, 3 * wide), nn.Linear(wide, wide)
        self.mlp = nn.Sequential(nn.Linear(wide, 4 * wide), nn.GELU(), nn.Linear(4 * wide, wide))

    def forward(self, x):
        rows, length, wide = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(rows, length, wide))
        return x + self.mlp(self.norm2(x))


@training("GPT", "causal attention, tied weights, decay by parameter's rank, cosine rates set by hand")
def gpt() -> Training:
    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places = nn.Embedding(WORDS, 32), nn.Embedding(12, 32)
            self.blocks, self.norm = nn.ModuleList(Block(32, 2) for _ in range(2)), nn.LayerNorm(32)
            self.head = nn.Linear(32, WORDS, bias=False)
            self.head.weight = self.words.weight

        def forward(self, ids):
            x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    module = GPT()
    groups = [
        {"params": [p for p in module.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in module.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    loss = lambda m, ids: F.cross_entropy(m(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    return one(module, loss, [tokens(4, 13) for _ in range(3)], torch.optim.AdamW(groups, 1e-3, betas=(0.9, 0.95)))


@training("LSTM language model", "state carried from batch to batch, detached")
def carried() -> Training:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.lstm, self.out = nn.Embedding(WORDS, 16), nn.LSTM(16, 16, 2), nn.Linear(16, WORDS)
            self.register_buffer("h", torch.zeros(2, 4, 16))
            self.register_buffer("c", torch.zeros(2, 4, 16))

        def forward(self, ids):
            y, (h, c) = self.lstm(self.words(ids), (self.h, self.c))
            self.h, self.c = h.detach(), c.detach()
            return self.out(y)

    loss = lambda m, ids: F.cross_entropy(m(ids[:-1]).flatten(0, 1), ids[1:].flatten())
    return one(Model(), loss, [tokens(9, 4) for _ in range(4)])


@training("BiLSTM-CRF", "forward algorithm over steps, Viterbi's scores, masks")
def crf() -> Training:
    class Tagger(nn.Module):
        def __init__(self, tags: int = 5):
            super().__init__()
            self.words, self.lstm = nn.Embedding(WORDS, 16), nn.LSTM(16, 8, bidirectional=True, batch_first=True)
            self.out, self.steps = nn.Linear(16, tags), nn.Parameter(torch.randn(tags, tags))

        def forward(self, ids, tags, mask):
            scores = self.out(self.lstm(self.words(ids))[0])
            total, gold = scores[:, 0], scores[:, 0].gather(1, tags[:, :1]).squeeze(1)
            for t in range(1, ids.shape[1]):
                new = torch.logsumexp(total[:, :, None] + self.steps + scores[:, t, None], 1)
                step = self.steps[tags[:, t - 1], tags[:, t]] + scores[:, t].gather(1, tags[:, t : t + 1]).squeeze(1)
                total = torch.where(mask[:, t, None], new, total)
                gold = gold + step * mask[:, t]
            return (torch.logsumexp(total, 1) - gold).mean()

    mask = torch.arange(6) < torch.tensor([6, 4, 5, 2])[:, None]
    return one(Tagger(), lambda m, b: m(*b), [(tokens(4, 6), torch.randint(0, 5, (4, 6)), mask) for _ in range(2)])


@training("mixture of experts", "two experts of four per token, counts depend on data, balancing loss")
def experts() -> Training:
    class Experts(nn.Module):
        def __init__(self, wide: int = 16, count: int = 4):
            super().__init__()
            self.gate, self.count = nn.Linear(wide, count, bias=False), count
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(wide, 24), nn.SiLU(), nn.Linear(24, wide)) for _ in range(count)
            )

        def forward(self, x):
            probabilities = self.gate(x).softmax(-1)
            weights, chosen = probabilities.topk(2, -1)
            weights, result = weights / weights.sum(-1, keepdim=True), torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows, slot = torch.where(chosen == number)
                result.index_add_(0, rows, expert(x[rows]) * weights[rows, slot, None])
            used = F.one_hot(chosen, self.count).float().mean((0, 1))
            return result, self.count * (used * probabilities.mean(0)).sum()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.experts, self.out = nn.Embedding(WORDS, 16), Experts(), nn.Linear(16, WORDS)

        def forward(self, ids):
            x = self.words(ids).flatten(0, 1)
            y, balance = self.experts(x)
            return self.out(x + y), balance

    def loss(module, ids):
        scores, balance = module(ids[:, :-1])
        return F.cross_entropy(scores, ids[:, 1:].flatten()) + 0.01 * balance

    return one(Model(), loss, [tokens(4, 9) for _ in range(3)])


@training("Mamba", "selective scan over steps, depthwise convolution, SiLU gates")
def mamba() -> Training:
    class Mixer(nn.Module):
        def __init__(self, wide: int = 16, inner: int = 32, states: int = 4, rank: int = 2):
            super().__init__()
            self.inp, self.conv = nn.Linear(wide, 2 * inner), nn.Conv1d(inner, inner, 4, padding=3, groups=inner)
            self.sizes, self.x = (rank, states, states), nn.Linear(inner, rank + 2 * states, bias=False)
            self.dt, self.out = nn.Linear(rank, inner), nn.Linear(inner, wide)
            self.a_log = nn.Parameter(torch.log(torch.arange(1, states + 1).float()).repeat(inner, 1))
            self.d = nn.Parameter(torch.ones(inner))

        def forward(self, x):
            u, gate = self.inp(x).chunk(2, -1)
            u = F.silu(self.conv(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
            dt, b, c = self.x(u).split(self.sizes, -1)
            dt, a = F.softplus(self.dt(dt)), -torch.exp(self.a_log)
            decay, fed = torch.exp(dt[..., None] * a), dt[..., None] * b[:, :, None] * u[..., None]
            h, steps = torch.zeros_like(fed[:, 0]), []
            for t in range(x.shape[1]):
                h = decay[:, t] * h + fed[:, t]
                steps.append((h * c[:, t, None]).sum(-1))
            return self.out((torch.stack(steps, 1) + u * self.d) * F.silu(gate))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.mixer, self.norm = nn.Embedding(WORDS, 16), Mixer(), nn.LayerNorm(16)
            self.out = nn.Linear(16, WORDS)

        def forward(self, ids):
            x = self.words(ids)
            return self.out(self.norm(x + self.mixer(x)))

    loss = lambda m, ids: F.cross_entropy(m(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    return one(Model(), loss, [tokens(4, 9) for _ in range(2)])


@training("text classifier", "EmbeddingBag with offsets, rows of several lengths")
def bags() -> Training:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag, self.out = nn.EmbeddingBag(WORDS, 16, mode="mean"), nn.Linear(16, 3)

        def forward(self, text, offsets):
            return self.out(self.bag(text, offsets))

    module = Model()
    batches = [(tokens(20), torch.tensor([0, 4, 9, 15]), torch.randint(0, 3, (4,))) for _ in range(2)]
    return one(module, lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2]), batches, adam(module, lr=1e-2))
