"""MemoryTransformer and MemoryAdapter in plain torch: they load an exported state dict with strict=True."""

import torch
from torch import nn
from torch.nn import functional

from jaxtrain.systems.memory_lm.config import get_memory_bank_assignments, get_memory_layer_indices
from jaxtrain.systems.memory_lm.torch_backbone import (
    ACTIVATIONS,
    CausalLM,
    Linear,
    RMSNorm,
    apply_lora,
    attention,
    rotate,
)

IGNORE = -100


class View:
    """Positions and mask of one batch."""

    def __init__(self, ids, mask=None, positions=None, segments=None):
        time = ids.shape[1]
        self.token_mask = mask
        places = torch.arange(time, device=ids.device)[None].expand(len(ids), -1)
        self.positions = places if positions is None else positions
        self.mask = torch.ones(time, time, dtype=torch.bool, device=ids.device).tril()[None, None]
        if mask is not None:
            self.mask = self.mask & mask[:, None, None]
        if segments is not None:
            self.mask = self.mask & (segments[:, None, :, None] == segments[:, None, None, :])
        self.segments = segments


class Bank(nn.Module):
    """`memory`, or `A` and `B`; `get` takes latents of any shape [..., rank or width]."""

    def __init__(self, memory, width: int):
        super().__init__()
        tokens, rank = memory.num_memory_tokens, memory.memory_rank
        self.factorized = memory.use_low_rank_memory and memory.low_rank_mode == "factorized"
        self.bits = memory.memory_quant_bits if memory.quantize_memory else None
        if self.factorized:
            self.A = nn.Parameter(torch.randn(tokens, rank) * memory.memory_init_std)
            self.B = nn.Parameter(torch.randn(width, rank) * rank**-0.5)
        else:
            self.memory = nn.Parameter(torch.randn(tokens, bank_width(memory, width)) * memory.memory_init_std)

    def forward(self):
        bank = self.A @ self.B.T if self.factorized else self.memory
        return bank if self.training or self.bits is None else quantised(bank, self.bits)


def quantised(bank, bits: int):
    """Every row rounded to 8 or 4 bits under a scale of its own, and back."""
    top = 2 ** (bits - 1) - 1
    scale = (bank.abs().amax(-1, keepdim=True) / top).clamp_min(1e-8)
    return (bank / scale).round().clamp(-top - 1, top) * scale


class Chapters(nn.Module):
    def __init__(self, bank: Bank, chapters: int):
        super().__init__()
        self.base_bank, self.chapters = bank, chapters

    def forward(self):
        return self.base_bank().unflatten(0, (self.chapters, -1))


class Router(nn.Module):
    def __init__(self, memory, width: int):
        super().__init__()
        self.router = Linear(width, memory.num_chapters)
        self.memory = memory

    def forward(self, hidden, view, strategy):
        """Chapter indices and weights, [batch, k] or [batch, time, k], and every chapter's logit."""
        memory = self.memory
        hidden = hidden.to(torch.promote_types(hidden.dtype, self.router.weight.dtype))
        if strategy == "token":
            pooled = hidden
        elif strategy == "prefix":
            pooled = self.prefix(hidden, view)
        elif view.segments is not None:
            pooled = self.document_mean(hidden, view, memory.routing_window_size if "rolling" in strategy else 1)
        else:
            mask = view.token_mask if memory.mask_aware_pooling and view.token_mask is not None else None
            ones = torch.ones(hidden.shape[:2], device=hidden.device) if mask is None else mask.float()
            window = memory.routing_window_size if strategy == "sequence-rolling" else None
            pooled = self.mean(hidden, ones, window)
        logits, shared = self.router(pooled), memory.num_shared_chapters
        p = logits.softmax(-1)
        p = p[..., shared:] / p[..., shared:].sum(-1, keepdim=True).clamp_min(1e-12)
        weights, indices = p.topk(min(memory.top_k_chapters, p.shape[-1]), -1)
        return indices + shared, weights / weights.sum(-1, keepdim=True).clamp_min(1e-12), logits

    @staticmethod
    def mean(hidden, ones, window):
        if window is not None:
            place = torch.arange(hidden.shape[1], device=hidden.device)
            near = (place[None] <= place[:, None]) & (place[None] > place[:, None] - window)
            weights = near[None] * ones[:, None]
            hidden = weights @ hidden / weights.sum(-1, keepdim=True).clamp_min(1.0)
        return (hidden * ones[..., None]).sum(1) / ones.sum(1, keepdim=True).clamp_min(1.0)

    @staticmethod
    def document_mean(hidden, view, window):
        same = (view.segments[:, :, None] == view.segments[:, None, :]).float()
        near = same.tril() - same.tril(-window)
        rolling = near @ hidden / near.sum(-1, keepdim=True)
        return same @ rolling / same.sum(-1, keepdim=True)

    @staticmethod
    def prefix(hidden, view):
        seen = view.mask[:, 0].float().expand(len(hidden), -1, -1)
        return seen @ hidden / seen.sum(-1, keepdim=True).clamp_min(1.0)


class MemoryAttention(nn.Module):
    def __init__(self, memory, width: int, heads: int, kv_heads: int):
        super().__init__()
        heads, kv_heads = memory.memory_num_heads or heads, memory.memory_num_kv_heads or kv_heads
        wide = bank_width(memory, width)
        reduced = memory.use_low_rank_memory and memory.low_rank_mode == "reduced_dim"
        inner = wide if reduced else width
        self.head = inner // heads
        sizes = {"q": (width, inner), "k": (wide, kv_heads * self.head), "v": (wide, kv_heads * self.head)}
        self.low_rank = memory.use_low_rank_projections and not reduced
        for name, (into, out) in (sizes | {"o": (inner, width)}).items():
            if self.low_rank:
                setattr(self, f"{name}_down", Linear(into, memory.projection_rank, bias=False))
                setattr(self, f"{name}_up", Linear(memory.projection_rank, out, bias=False))
            else:
                setattr(self, f"{name}_proj", Linear(into, out, bias=False))
        self.memory = memory

    def project(self, name, x):
        if self.low_rank:
            return getattr(self, f"{name}_up")(getattr(self, f"{name}_down")(x))
        return getattr(self, f"{name}_proj")(x)

    def heads(self, name, x):
        return self.project(name, x).unflatten(-1, (-1, self.head))

    def forward(self, x, bank, routing):
        """x: [batch, time, width]; bank: [token, width], or by chapter [chapter, token, width]."""
        q = self.heads("q", x)
        if routing is None:
            y = self.attend(q, bank.expand(len(x), -1, -1))
        elif self.memory.routing_strategy_inference in ("token", "prefix"):
            y = self.per_token(q, bank, *routing)
        elif routing[0].ndim == 3:  # in packed rows: the tokens of a document share its choice
            rows = self.per_sequence(q.flatten(0, 1)[:, None], bank, *(each.flatten(0, 1) for each in routing))
            y = rows[:, 0].unflatten(0, q.shape[:2])
        else:
            y = self.per_sequence(q, bank, *routing)
        return self.project("o", y.flatten(2))

    def attend(self, q, memory):
        return attention(q, self.heads("k", memory), self.heads("v", memory))

    def per_sequence(self, q, bank, indices, weights):
        memory, shared = self.memory, self.memory.num_shared_chapters
        both = shared and indices.shape[-1]
        if shared:
            first = torch.arange(shared, device=indices.device).expand(len(indices), -1)
            indices = torch.cat([first, indices], -1)
            ones = torch.ones(first.shape, device=weights.device)
            weights = torch.cat([ones, memory.routed_scaling_factor * weights], -1)
            weights = weights / weights.sum(-1, keepdim=True)
        selected = branch_norm(memory, both, bank[indices])
        if memory.chapter_softmax == "independent":
            parts = [self.attend(q, selected[:, i]) for i in range(selected.shape[1])]
            return sum(weights[:, i, None, None, None] * part for i, part in enumerate(parts))
        return self.attend(q, (selected * weights[..., None, None]).flatten(1, 2))

    def per_token(self, q, bank, indices, weights):
        memory, shared = self.memory, self.memory.num_shared_chapters
        bank = branch_norm(memory, shared and indices.shape[-1], bank)
        y = torch.zeros_like(q)
        if shared:
            y = y + self.attend(q, bank[:shared].flatten(0, 1).expand(len(q), -1, -1))
        flat = q.flatten(0, 1)[:, None]
        for i in range(indices.shape[-1]):
            part = self.attend(flat, bank[indices[..., i].flatten()])[:, 0].unflatten(0, q.shape[:2])
            y = y + memory.routed_scaling_factor * weights[..., i, None, None] * part
        return y


def branch_norm(memory, both, x):
    if not (memory.normalize_shared_routed_before_mixing and both):
        return x
    if memory.shared_routed_norm_type == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + memory.shared_routed_norm_eps)


def bank_width(memory, width: int) -> int:
    reduced = memory.use_low_rank_memory and memory.low_rank_mode == "reduced_dim"
    return memory.memory_rank if reduced else memory.memory_dim or width


class Rotary(nn.Module):
    def __init__(self, width: int, theta: float):
        super().__init__()
        self.register_buffer("inv_freq", theta ** (-torch.arange(0, width, 2, dtype=torch.float32) / width))


class SelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, self.head = config.hidden_dim, config.hidden_dim // config.num_heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, config.kv_heads * self.head, bias=False)
        self.v_proj = nn.Linear(width, config.kv_heads * self.head, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        if config.use_rope:
            self.rotary = Rotary(self.head, config.rope_theta)

    def forward(self, x, view):
        q, k, v = (p(x).unflatten(-1, (-1, self.head)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "rotary"):
            angles = view.positions[..., None].float() * self.rotary.inv_freq
            q, k = rotate(q, angles), rotate(k, angles)
        return self.o_proj(attention(q, k, v, view.mask).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gated = config.hidden_activation == "swiglu"
        if self.gated:
            self.gate_proj = nn.Linear(config.hidden_dim, config.intermediate_dim, bias=False)
        self.up_proj = nn.Linear(config.hidden_dim, config.intermediate_dim, bias=False)
        self.down_proj = nn.Linear(config.intermediate_dim, config.hidden_dim, bias=False)
        self.activation = functional.silu if self.gated else ACTIVATIONS[config.hidden_activation]

    def forward(self, x):
        y = self.up_proj(x)
        return self.down_proj(self.activation(self.gate_proj(x)) * y if self.gated else self.activation(y))


def make_norm(config):
    kind = RMSNorm if config.use_rms_norm else nn.LayerNorm
    return kind(config.hidden_dim, eps=config.norm_eps)


class Block(nn.Module):
    def __init__(self, config, memory, reads: bool):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = make_norm(config), make_norm(config)
        self.self_attn, self.mlp = SelfAttention(config), FeedForward(config)
        self.variant = memory.memory_block_variant if reads else None
        if reads:
            self.memory_layernorm = make_norm(config)
            self.memory_attn = MemoryAttention(memory, config.hidden_dim, config.num_heads, config.kv_heads)
        if self.variant == "B":
            self.post_memory_layernorm = make_norm(config)
            self.post_memory_mlp = FeedForward(config)

    def forward(self, x, view, bank, routing):
        x = x + self.self_attn(self.input_layernorm(x), view)
        if self.variant == "A":
            x = x + self.memory_attn(self.memory_layernorm(x), bank, routing)
        x = x + self.mlp(self.post_attention_layernorm(x))
        if self.variant == "B":
            x = x + self.memory_attn(self.memory_layernorm(x), bank, routing)
            x = x + self.post_memory_mlp(self.post_memory_layernorm(x))
        return x


class MemoryModel(nn.Module):
    """Implement what both models share: banks, routers, and the bank of each layer."""

    def place(self, memory, layers: int, width: int):
        self.memory = memory
        self.reading = get_memory_layer_indices(memory, layers)
        self.bank_of = get_memory_bank_assignments(memory, self.reading)
        count = max(self.bank_of.values()) + 1 if self.reading else 0
        banks = [Bank(memory, memory.memory_dim or width) for _ in range(count)]
        if memory.use_chapters:
            banks = [Chapters(bank, memory.num_chapters) for bank in banks]
        self.memory_banks = nn.ModuleList(banks)
        chosen = self.reading if memory.use_chapters else []
        self.routers = nn.ModuleDict({str(layer): Router(memory, width) for layer in chosen})

    def route(self, layer: int, hidden, view):
        if layer not in self.bank_of or not self.memory.use_chapters:
            return None
        strategy = self.memory.routing_strategy_inference
        strategy = "sequence" if strategy in ("rolling", "hybrid") else strategy
        return self.routers[str(layer)](hidden, view, strategy)


class MemoryTransformer(MemoryModel):
    """input_ids int [batch, time] -> logits [batch, time, vocabulary], every chapter's probability by memory layer."""

    def __init__(self, config, memory):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_dim)
        self.place(memory, config.num_layers, config.hidden_dim)
        self.layers = nn.ModuleList(Block(config, memory, i in self.bank_of) for i in range(config.num_layers))
        self.norm = make_norm(config)
        self.lm_head = nn.Linear(config.hidden_dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids, attention_mask=None, position_ids=None, segment_ids=None):
        view = View(input_ids, attention_mask, position_ids, segment_ids)
        x, chosen = self.embed_tokens(input_ids), {}
        for i, layer in enumerate(self.layers):
            routing = self.route(i, x, view)
            if routing is not None:
                chosen[i], routing = routing[2].softmax(-1), routing[:2]
            x = layer(x, view, self.memory_banks[self.bank_of[i]]() if i in self.bank_of else None, routing)
        return self.lm_head(self.norm(x)), chosen


class Adapter(nn.Module):
    def __init__(self, config, memory):
        super().__init__()
        self.memory_layernorm = RMSNorm(config.hidden_size, 1e-6)
        self.memory_attn = MemoryAttention(memory, config.hidden_size, config.num_heads, config.kv_heads)


class MemoryAdapter(MemoryModel):
    """A pretrained decoder whose layers also read memory; `base_model` holds Hugging Face's keys."""

    def __init__(self, config, memory, base_dtype=torch.float32):
        super().__init__()
        self.base_model = CausalLM(config).to(base_dtype)
        if memory.lora:
            apply_lora(self.base_model, memory)
        self.place(memory, config.num_layers, config.hidden_size)
        self.memory_adapters = nn.ModuleDict({str(i): Adapter(config, memory) for i in self.reading})

    def forward(self, input_ids, attention_mask=None, position_ids=None, segment_ids=None):
        view = View(input_ids, attention_mask, position_ids, segment_ids)
        decoder, chosen = self.base_model.model, {}
        x = decoder.embed_tokens(input_ids)
        for i, layer in enumerate(decoder.layers):
            x = layer(x, view)
            if i not in self.bank_of:
                continue
            routing = self.route(i, x, view)
            if routing is not None:
                chosen[i], routing = routing[2].softmax(-1), routing[:2]
            adapter, bank = self.memory_adapters[str(i)], self.memory_banks[self.bank_of[i]]()
            x = x + adapter.memory_attn(adapter.memory_layernorm(x), bank, routing).to(x.dtype)
        return self.base_model.lm_head(decoder.norm(x)), chosen


def build(config):
    """The twin of either task's config."""
    if config.model.base_config is None and config.model.base_model_name is None:
        return MemoryTransformer(config.model, config.memory)
    from jaxtrain.systems.memory_lm.adapter import backbone_config, base_dtype

    return MemoryAdapter(backbone_config(config.model), config.memory, getattr(torch, base_dtype(config)))


def call(module, batch):
    """Compute `losses.outputs`: log-probabilities of the labels, and mean chapter probabilities by layer."""
    logits, labels, chosen = _run(module, batch)
    keep = labels != IGNORE
    picked = logits.float().log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    result = {"log_probability": torch.where(keep, picked, 0.0)}
    for layer, p in chosen.items():
        result[f"chapters/{layer}"] = p.reshape(len(p), -1, p.shape[-1]).mean(1)
    return result


def loss(module, batch, config):
    """Mean cross-entropy in nats per label, without the router's terms."""
    logits, labels, _ = _run(module, batch)
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE)


def _run(module, batch):
    ids, labels = batch["input_ids"].long(), batch["labels"][:, 1:].long()
    segments = batch.get("segment_ids")
    logits, chosen = module(ids, _token_mask(batch), batch.get("position_ids"), segments)
    labels = labels.masked_fill(~batch["valid"][:, None] | ~_token_mask(batch)[:, :-1], IGNORE)
    if segments is not None:
        labels = labels.masked_fill(segments[:, 1:] != segments[:, :-1], IGNORE)
    return logits[:, :-1], labels, chosen


def _token_mask(batch):
    return batch["attention_mask"].bool() if "attention_mask" in batch else batch["segment_ids"] > 0
