# ruff: noqa: E501  # tables of settings read better in whole lines
"""Language models, translation, captions, embeddings of words and sentences."""

import peft
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from tests.chaos.trainings import Training, Update, one, repeated, training

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


@training("karpathy/nanoGPT model.py and train.py: weight tying, decay groups, clipping")
def nano_gpt():
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.LayerNorm(32), nn.LayerNorm(32)
            self.attend, self.project = nn.Linear(32, 96), nn.Linear(32, 32)
            self.mlp = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

        def forward(self, x):
            b, t, c = x.size()
            q, k, v = (z.view(b, t, 4, c // 4).transpose(1, 2) for z in self.attend(self.first(x)).split(32, dim=2))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.project(y.transpose(1, 2).contiguous().view(b, t, c))
            return x + self.mlp(self.second(x))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(65, 32), nn.Embedding(16, 32)
            self.blocks, self.norm = nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(32)
            self.head = nn.Linear(32, 65, bias=False)
            self.wte.weight = self.head.weight

        def forward(self, ids, targets=None):
            x = self.wte(ids) + self.wpe(torch.arange(ids.size(1), device=ids.device))
            for block in self.blocks:
                x = block(x)
            logits = self.head(self.norm(x))
            return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

    model = Gpt()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    data = repeated(lambda g: torch.randint(65, (2, 4, 16), generator=g).unbind())
    return Training({"model": model}, {"loss": Update(lambda model, b: model(*b)[1], optimizer)}, data)


def token_rows(rows: int = 4, length: int = 12, vocabulary: int = 64):
    """Ids with padding on the right, a mask, and labels with -100 on the padding."""

    def batch(g):
        ids = torch.randint(3, vocabulary, (rows, length), generator=g)
        lengths = torch.randint(length // 2, length + 1, (rows, 1), generator=g)
        mask = (torch.arange(length) < lengths).long()
        return {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}

    return repeated(batch)


def library_loss(model, batch):
    return model(**batch).loss


@training("huggingface/transformers examples: BERT, masked words")
def bert_masked_words():
    torch.manual_seed(0)
    config = transformers.BertConfig(**SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return one(transformers.BertForMaskedLM(config), library_loss, token_rows())


@training("huggingface/transformers examples: Llama with padding on the right")
def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, max_position_embeddings=32)
    return one(transformers.LlamaForCausalLM(config), library_loss, token_rows())


@training("huggingface/transformers examples: T5, sequence to sequence")
def t5():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    return one(transformers.T5ForConditionalGeneration(config), library_loss, token_rows())


@training("huggingface/peft examples: LoRA on GPT-2")
def gpt2_lora():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], lora_dropout=0.0, fan_in_fan_out=True)
    return one(peft.get_peft_model(transformers.GPT2LMHeadModel(config), lora), library_loss, token_rows())


@training("huggingface/sentence-transformers: multiple negatives ranking over mean-pooled BERT")
def sentence_pairs():
    torch.manual_seed(0)
    config = transformers.BertConfig(**SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = transformers.BertModel(config, add_pooling_layer=False)

    def encode(model, features):
        states = model(**features).last_hidden_state
        mask = features["attention_mask"].unsqueeze(-1).expand(states.size()).float()
        return torch.sum(states * mask, 1) / torch.clamp(mask.sum(1), min=1e-9)

    def loss(model, pair):
        a, b = (F.normalize(encode(model, side), p=2, dim=1) for side in pair)
        scores = torch.mm(a, b.transpose(0, 1)) * 20.0
        return F.cross_entropy(scores, torch.arange(len(scores)))

    def batch(g):
        ids = torch.randint(3, 64, (2, 6, 8), generator=g)
        mask = (torch.arange(8) < torch.randint(3, 9, (2, 6, 1), generator=g)).long()
        return [{"input_ids": i * m, "attention_mask": m} for i, m in zip(ids, mask, strict=True)]

    return one(model, loss, repeated(batch))


@training("pytorch/examples word_language_model: the hidden state goes on from batch to batch")
def lstm_language_model():
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.rnn, self.decoder = nn.Embedding(40, 24), nn.LSTM(24, 24, 2), nn.Linear(24, 40)
            self.hidden = None

        def forward(self, tokens):
            output, hidden = self.rnn(self.encoder(tokens), self.hidden)
            self.hidden = tuple(h.detach() for h in hidden)
            return F.log_softmax(self.decoder(output).view(-1, 40), dim=1)

    model = Model()
    model.hidden = (torch.zeros(2, 4, 24), torch.zeros(2, 4, 24))
    data = repeated(lambda g: (torch.randint(40, (9, 4), generator=g), torch.randint(40, (36,), generator=g)))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    return Training({"model": model}, {"loss": Update(lambda m, b: F.nll_loss(m(b[0]), b[1]), optimizer)}, data)


@training("sgrvinod/a-PyTorch-Tutorial-to-Image-Captioning: attention, packed rows of sorted captions")
def captions():
    torch.manual_seed(0)

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.cell = nn.Embedding(30, 16), nn.LSTMCell(16 + 12, 24)
            self.of_image, self.of_state, self.score = nn.Linear(12, 16), nn.Linear(24, 16), nn.Linear(16, 1)
            self.start, self.out = nn.Linear(12, 24), nn.Linear(24, 30)

        def forward(self, image, words, lengths):
            embedded = self.embedding(words)
            h = c = self.start(image.mean(1))
            steps = max(lengths)
            predictions, alphas = torch.zeros(len(image), steps, 30), torch.zeros(len(image), steps, image.size(1))
            for t in range(steps):
                rows = sum(length > t for length in lengths)
                scores = self.score(torch.relu(self.of_image(image[:rows]) + self.of_state(h[:rows]).unsqueeze(1)))
                alpha = F.softmax(scores.squeeze(2), dim=1)
                seen = (image[:rows] * alpha.unsqueeze(2)).sum(1)
                h, c = self.cell(torch.cat([embedded[:rows, t], seen], 1), (h[:rows], c[:rows]))
                predictions[:rows, t], alphas[:rows, t] = self.out(h), alpha
            return predictions, alphas

    def loss(model, batch):
        image, words, lengths = batch
        decode = [n - 1 for n in lengths]
        scores, alphas = model(image, words, decode)
        scores, *_ = pack_padded_sequence(scores, decode, batch_first=True)
        targets, *_ = pack_padded_sequence(words[:, 1:], decode, batch_first=True)
        return F.cross_entropy(scores, targets) + ((1.0 - alphas.sum(dim=1)) ** 2).mean()

    def batch(g):
        return torch.randn(4, 9, 12, generator=g), torch.randint(1, 30, (4, 8), generator=g), [8, 7, 7, 4]

    return one(Decoder(), loss, repeated(batch))


@training("bentrevett/pytorch-seq2seq: GRU with attention, packed source, teacher forcing")
def translation():
    torch.manual_seed(0)

    class Seq2Seq(nn.Module):
        def __init__(self):
            super().__init__()
            self.source, self.target = nn.Embedding(40, 16), nn.Embedding(40, 16)
            self.encoder = nn.GRU(16, 16, bidirectional=True)
            self.bridge, self.attention, self.v = nn.Linear(32, 24), nn.Linear(56, 24), nn.Linear(24, 1, bias=False)
            self.decoder, self.out = nn.GRU(48, 24), nn.Linear(24 + 32 + 16, 40)

        def forward(self, source, lengths, target):
            packed = pack_padded_sequence(self.source(source), lengths)
            states, hidden = self.encoder(packed)
            states, _ = nn.utils.rnn.pad_packed_sequence(states, total_length=len(source))
            hidden = torch.tanh(self.bridge(torch.cat((hidden[-2], hidden[-1]), 1)))
            mask = (source != 0).permute(1, 0)
            outputs = []
            for word in target[:-1]:
                repeat = hidden.unsqueeze(1).repeat(1, len(source), 1)
                energy = torch.tanh(self.attention(torch.cat((repeat, states.permute(1, 0, 2)), 2)))
                a = F.softmax(self.v(energy).squeeze(2).masked_fill(mask == 0, -1e10), dim=1)
                seen = torch.bmm(a.unsqueeze(1), states.permute(1, 0, 2)).permute(1, 0, 2)
                embedded = self.target(word).unsqueeze(0)
                output, hidden = self.decoder(torch.cat((embedded, seen), 2), hidden.unsqueeze(0))
                hidden = hidden.squeeze(0)
                outputs.append(self.out(torch.cat((output[0], seen[0], embedded[0]), 1)))
            return torch.stack(outputs)

    def loss(model, batch):
        source, lengths, target = batch
        return F.cross_entropy(model(source, lengths, target).flatten(0, 1), target[1:].flatten(), ignore_index=0)

    def batch(g):
        lengths = torch.tensor([7, 6, 4])
        source = torch.randint(1, 40, (7, 3), generator=g) * (torch.arange(7)[:, None] < lengths)
        return source, lengths, torch.randint(1, 40, (6, 3), generator=g)

    return one(Seq2Seq(), loss, repeated(batch))


@training("pytorch tutorials, word embeddings: skip-gram with negative samples")
def skip_gram():
    torch.manual_seed(0)

    class SkipGram(nn.Module):
        def __init__(self):
            super().__init__()
            self.u, self.v = nn.Embedding(100, 16), nn.Embedding(100, 16)

        def forward(self, centre, context, negative):
            u = self.u(centre)
            score = F.logsigmoid(torch.clamp((u * self.v(context)).sum(1), -10, 10))
            others = torch.bmm(self.v(negative), u.unsqueeze(2)).squeeze(2)
            return -(score - F.logsigmoid(-torch.clamp(others, -10, 10)).neg().sum(1)).mean()

    data = repeated(
        lambda g: (torch.randint(100, (16,), generator=g), torch.randint(100, (16,), generator=g), torch.randint(100, (16, 5), generator=g))
    )  # fmt: skip
    return one(SkipGram(), lambda model, batch: model(*batch), data)


@training("state-spaces/mamba: selective scan written as a loop over time")
def mamba():
    torch.manual_seed(0)

    class Mamba(nn.Module):
        def __init__(self, width: int = 16, state: int = 4):
            super().__init__()
            self.embed, self.enter = nn.Embedding(30, width), nn.Linear(width, 2 * width)
            self.conv = nn.Conv1d(width, width, 4, padding=3, groups=width)
            self.select, self.delta = nn.Linear(width, 2 * state + 2), nn.Linear(2, width)
            self.a_log = nn.Parameter(torch.log(torch.arange(1, state + 1).float().repeat(width, 1)))
            self.d, self.out, self.head = nn.Parameter(torch.ones(width)), nn.Linear(width, width), nn.Linear(width, 30)
            self.state = state

        def forward(self, ids):
            x, gate = self.enter(self.embed(ids)).chunk(2, -1)
            x = F.silu(self.conv(x.transpose(1, 2))[..., : ids.shape[1]].transpose(1, 2))
            rank, b, c = self.select(x).split([2, self.state, self.state], -1)
            delta = F.softplus(self.delta(rank))
            a = -torch.exp(self.a_log)
            h, ys = x.new_zeros(len(x), x.shape[2], self.state), []
            for t in range(x.shape[1]):
                h = torch.exp(delta[:, t, :, None] * a) * h + delta[:, t, :, None] * b[:, t, None] * x[:, t, :, None]
                ys.append((h * c[:, t, None]).sum(-1))
            y = (torch.stack(ys, 1) + self.d * x) * F.silu(gate)
            return self.head(self.out(y))

    loss = lambda model, ids: F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    return one(Mamba(), loss, repeated(lambda g: torch.randint(30, (4, 13), generator=g)))


@training("mixture of experts as in mistral-inference: top 2 of 4, with a load-balancing loss kept on the module")
def mixture_of_experts():
    torch.manual_seed(0)

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(16, 4, bias=False)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16)) for _ in range(4)
            )
            self.balance = torch.zeros(())

        def forward(self, x):
            weights = F.softmax(self.gate(x), -1)
            best, chosen = torch.topk(weights, 2)
            best = best / best.sum(-1, keepdim=True)
            y = torch.zeros_like(x)
            for i, expert in enumerate(self.experts):
                row, nth = torch.where(chosen == i)
                y = y.index_add(0, row, best[row, nth, None] * expert(x[row]))
            self.balance = 4 * (weights.mean(0) * F.one_hot(chosen[:, 0], 4).float().mean(0)).sum()
            return y

    def loss(model, batch):
        x, y = batch
        return F.mse_loss(model(x), y) + 0.01 * model.balance

    return one(Experts(), loss, repeated(lambda g: torch.randn(2, 12, 16, generator=g).unbind()))
