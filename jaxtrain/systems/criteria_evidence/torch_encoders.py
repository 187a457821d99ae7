"""BERT, RoBERTa and DeBERTa encoders in plain torch, with transformers' state-dict keys."""

import math

import torch
from torch import nn
from torch.nn import functional

from jaxtrain.systems.criteria_evidence.deberta import relative_rows
from jaxtrain.systems.criteria_evidence.lora import Lora

ACTIVATIONS = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "geglu": functional.gelu,
    "silu": functional.silu,
    "swish": functional.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


class Act(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.function = ACTIVATIONS[name]

    def forward(self, x):
        return self.function(x)


class Embeddings(nn.Module):
    def __init__(self, c):
        super().__init__()
        width = c.embedding_size or c.hidden_size
        roberta, deberta = c.kind == "roberta", c.kind == "deberta"
        self.c = c
        self.word_embeddings = nn.Embedding(c.vocab_size, width, padding_idx=c.pad_token_id)
        if not roberta and not (deberta and not c.position_biased_input):
            self.position_embeddings = nn.Embedding(c.max_position_embeddings, width)
        if c.type_vocab_size:
            self.token_type_embeddings = nn.Embedding(c.type_vocab_size, width)
        if deberta and width != c.hidden_size:
            self.embed_proj = nn.Linear(width, c.hidden_size, bias=False)
        self.LayerNorm = nn.LayerNorm(c.hidden_size, eps=c.layer_norm_eps)
        if roberta:
            self.position_embeddings = nn.Embedding(c.max_position_embeddings, width, padding_idx=c.pad_token_id)
        self.dropout = nn.Dropout(c.hidden_dropout_prob)

    def forward(self, ids, mask, types):
        x = self.word_embeddings(ids)
        if hasattr(self, "token_type_embeddings"):
            x = x + self.token_type_embeddings(torch.zeros_like(ids) if types is None else types)
        if hasattr(self, "position_embeddings"):
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
            if self.c.kind == "roberta":
                real = (ids != self.c.pad_token_id).long()
                positions = real.cumsum(1) * real + self.c.pad_token_id
            x = x + self.position_embeddings(positions)
        if hasattr(self, "embed_proj"):
            x = self.embed_proj(x)
        x = self.LayerNorm(x)
        if self.c.kind == "deberta":
            x = x * mask[..., None].to(x.dtype)
        return self.dropout(x)


def heads_of(x, count):
    """Reshape [batch, token, width] to [batch, head, token, width / heads]."""
    return x.unflatten(-1, (count, -1)).transpose(-3, -2)


class SelfAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.query = nn.Linear(c.hidden_size, c.hidden_size)
        self.key = nn.Linear(c.hidden_size, c.hidden_size)
        self.value = nn.Linear(c.hidden_size, c.hidden_size)
        self.c = c

    def forward(self, x, mask, relative):
        q, k, v = (heads_of(project(x), self.c.num_attention_heads) for project in (self.query, self.key, self.value))
        rate = self.c.attention_probs_dropout_prob if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=(mask != 0)[:, None, None], dropout_p=rate)
        return y.transpose(1, 2).flatten(-2)


class DisentangledAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.query_proj = nn.Linear(c.hidden_size, c.hidden_size)
        self.key_proj = nn.Linear(c.hidden_size, c.hidden_size)
        self.value_proj = nn.Linear(c.hidden_size, c.hidden_size)
        separate = c.relative_attention and not c.share_att_key
        if separate and "c2p" in c.pos_att_type:
            self.pos_key_proj = nn.Linear(c.hidden_size, c.hidden_size)
        if separate and "p2c" in c.pos_att_type:
            self.pos_query_proj = nn.Linear(c.hidden_size, c.hidden_size)
        self.dropout = nn.Dropout(c.attention_probs_dropout_prob)
        self.pos_dropout = nn.Dropout(c.hidden_dropout_prob)
        self.c = c

    def forward(self, x, mask, relative):
        count, kinds = self.c.num_attention_heads, self.c.pos_att_type
        q, k, v = (heads_of(p(x), count) for p in (self.query_proj, self.key_proj, self.value_proj))
        scores = q @ k.transpose(-1, -2)
        if relative is not None:
            rows = torch.from_numpy(relative_rows(x.shape[1], self.c)).to(x.device).expand(*scores.shape)
            relative = self.pos_dropout(relative)
            if "c2p" in kinds:
                keys = heads_of(getattr(self, "pos_key_proj", self.key_proj)(relative), count)
                scores = scores + (q @ keys.transpose(-1, -2)).gather(-1, rows)
            if "p2c" in kinds:
                queries = heads_of(getattr(self, "pos_query_proj", self.query_proj)(relative), count)
                back = (k @ queries.transpose(-1, -2)).gather(-1, rows.transpose(-1, -2))
                scores = scores + back.transpose(-1, -2)
        scores = scores / math.sqrt(q.shape[-1] * (1 + len(set(kinds))))
        visible = (mask != 0)[:, None, None, :] & (mask != 0)[:, None, :, None]
        weights = self.dropout(scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(-1))
        return (weights @ v).transpose(1, 2).flatten(-2)


class Residual(nn.Module):
    def __init__(self, inputs, c):
        super().__init__()
        self.dense = nn.Linear(inputs, c.hidden_size)
        self.LayerNorm = nn.LayerNorm(c.hidden_size, eps=c.layer_norm_eps)
        self.dropout = nn.Dropout(c.hidden_dropout_prob)

    def forward(self, x, residual):
        return self.LayerNorm(self.dropout(self.dense(x)) + residual)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self = DisentangledAttention(c) if c.kind == "deberta" else SelfAttention(c)
        self.output = Residual(c.hidden_size, c)

    def forward(self, x, mask, relative):
        return self.output(self.self(x, mask, relative), x)


class Intermediate(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.dense = nn.Linear(c.hidden_size, c.intermediate_size)
        self.act = Act(c.hidden_act)

    def forward(self, x):
        return self.act(self.dense(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attention = Attention(c)
        self.intermediate = Intermediate(c)
        self.output = Residual(c.intermediate_size, c)

    def forward(self, x, mask, relative):
        x = self.attention(x, mask, relative)
        return self.output(self.intermediate(x), x)


class Convolution(nn.Module):
    def __init__(self, c):
        super().__init__()
        kernel = c.conv_kernel_size
        self.conv = nn.Conv1d(c.hidden_size, c.hidden_size, kernel, padding=(kernel - 1) // 2, groups=c.conv_groups)
        self.LayerNorm = nn.LayerNorm(c.hidden_size, eps=c.layer_norm_eps)
        self.dropout = nn.Dropout(c.hidden_dropout_prob)
        self.act = Act(c.conv_act)

    def forward(self, x, residual, mask):
        mask = mask[..., None].to(x.dtype)
        y = self.conv(x.transpose(1, 2)).transpose(1, 2) * (mask != 0)
        return self.LayerNorm(residual + self.act(self.dropout(y))) * mask


class Layers(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.layer = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        if c.kind == "deberta":
            if c.relative_attention:
                self.rel_embeddings = nn.Embedding(2 * c.relative_span, c.hidden_size)
            if "layer_norm" in c.norm_rel_ebd:
                self.LayerNorm = nn.LayerNorm(c.hidden_size, eps=c.layer_norm_eps)
            if c.conv_kernel_size:
                self.conv = Convolution(c)

    def forward(self, x, mask):
        relative, embedded = None, x
        if hasattr(self, "rel_embeddings"):
            relative = self.rel_embeddings.weight
            relative = self.LayerNorm(relative) if hasattr(self, "LayerNorm") else relative
        for i, layer in enumerate(self.layer):
            x = layer(x, mask, relative)
            if i == 0 and hasattr(self, "conv"):
                x = self.conv(embedded, x, mask)
        return x


class Pooler(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.dense = nn.Linear(c.hidden_size, c.hidden_size)

    def forward(self, hidden):
        return torch.tanh(self.dense(hidden[:, 0]))


class Encoder(nn.Module):
    """Encoder that returns (hidden [batch, token, width], pooled [batch, width] or None)."""

    def __init__(self, c):
        super().__init__()
        self.embeddings = Embeddings(c)
        self.encoder = Layers(c)
        if c.has_pooler:
            self.pooler = Pooler(c)
        self.apply(lambda module: initialise(module, c.initializer_range))

    def forward(self, ids, mask=None, types=None):
        mask = torch.ones_like(ids) if mask is None else mask
        hidden = self.encoder(self.embeddings(ids, mask, types), mask)
        return hidden, self.pooler(hidden) if hasattr(self, "pooler") else None


def initialise(module, std):
    if isinstance(module, (nn.Linear, nn.Embedding, nn.Conv1d)):
        nn.init.normal_(module.weight, std=std)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight.data[module.padding_idx].zero_()


class LoraLinear(nn.Module):
    def __init__(self, base, lora: Lora):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, lora.r, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(lora.r, base.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)
        self.dropout = nn.Dropout(lora.dropout)
        self.scale = lora.alpha / lora.r

    def forward(self, x):
        return self.base_layer(x) + self.scale * self.lora_B["default"](self.lora_A["default"](self.dropout(x)))


class PeftEncoder(nn.Module):
    def __init__(self, encoder, lora: Lora, sizes):
        super().__init__()
        for module in list(encoder.modules()):
            for name in lora.target_names(sizes):
                if isinstance(getattr(module, name, None), nn.Linear):
                    setattr(module, name, LoraLinear(getattr(module, name), lora))
        self.base_model = nn.Module()
        self.base_model.model = encoder

    def forward(self, *arguments):
        return self.base_model.model(*arguments)
