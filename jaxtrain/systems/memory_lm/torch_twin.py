"""MemoryTransformer and MemoryAdapter in plain torch: they load an exported state dict with strict=True."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from jaxtrain.systems.memory_lm.config import get_memory_bank_assignments, get_memory_layer_indices
from jaxtrain.systems.memory_lm.torch_backbone import (
    ACTIVATIONS,
    CausalLM,
    LoRALinear,
    RMSNorm,
    apply_lora,
    attention,
    rotate,
)
from jaxtrain.systems.memory_lm.torch_memory import MemoryAttention, Router, View, make_bank

IGNORE = -100


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
        self.dropout = config.attention_dropout
        if config.use_rope:
            self.rotary = Rotary(self.head, config.rope_theta)

    def forward(self, x, view):
        q, k, v = (p(x).unflatten(-1, (-1, self.head)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "rotary"):
            angles = view.positions[..., None].float() * self.rotary.inv_freq
            q, k = rotate(q, angles), rotate(k, angles)
        k, v = view.extend(k, v)
        return self.o_proj(attention(q, k, v, view.mask, self.dropout if self.training else 0.0).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gated = config.hidden_activation == "swiglu"
        if self.gated:
            self.gate_proj = nn.Linear(config.hidden_dim, config.intermediate_dim, bias=False)
        self.up_proj = nn.Linear(config.hidden_dim, config.intermediate_dim, bias=False)
        self.down_proj = nn.Linear(config.intermediate_dim, config.hidden_dim, bias=False)
        self.activation = functional.silu if self.gated else ACTIVATIONS[config.hidden_activation]
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        y = self.up_proj(x)
        y = self.activation(self.gate_proj(x)) * y if self.gated else self.activation(y)
        return self.dropout(self.down_proj(y))


def make_norm(config):
    kind = RMSNorm if config.use_rms_norm else nn.LayerNorm
    return kind(config.hidden_dim, eps=config.norm_eps)


class Block(nn.Module):
    def __init__(self, config, memory, reads: bool, make_attention=MemoryAttention):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = make_norm(config), make_norm(config)
        self.self_attn, self.mlp = SelfAttention(config), FeedForward(config)
        self.variant = memory.memory_block_variant if reads else None
        if reads:
            self.memory_layernorm = make_norm(config)
            sizes = (config.hidden_dim, config.num_heads, config.kv_heads)
            self.memory_attn = make_attention(memory, *sizes, config.dropout)
        if self.variant == "B":
            self.post_memory_layernorm = make_norm(config)
            self.post_memory_mlp = FeedForward(config)

    def forward(self, x, view, bank, routing):
        x = x + self.self_attn(self.input_layernorm(x), view)
        if self.variant == "A":
            x = x + self.memory_attn(self.memory_layernorm(x), bank, routing=routing, strategy=view.strategy)
        x = x + self.mlp(self.post_attention_layernorm(x))
        if self.variant == "B":
            x = x + self.memory_attn(self.memory_layernorm(x), bank, routing=routing, strategy=view.strategy)
            x = x + self.post_memory_mlp(self.post_memory_layernorm(x))
        return x


class MemoryModel(nn.Module):
    """Base of both models: banks, routers, and the bank of each layer."""

    make_router, make_attention, make_lora = Router, MemoryAttention, LoRALinear
    recomputes_layers = False  # in the backward pass, instead of storing their activations

    def insert_memory(self, memory, layers: int, width: int, as_set: bool):
        self.memory = memory
        self.reading = get_memory_layer_indices(memory, layers)
        order = list(set(self.reading)) if as_set else self.reading  # the original's order in optimizer.bin
        self.bank_of = get_memory_bank_assignments(memory, self.reading)
        count = max(self.bank_of.values()) + 1 if self.reading else 0
        self.memory_banks = nn.ModuleList(make_bank(memory, memory.memory_dim or width) for _ in range(count))
        chosen = order if memory.use_chapters else []
        self.routers = nn.ModuleDict({str(layer): self.make_router(memory, width) for layer in chosen})

    def begin(self, view) -> None:
        """Set this call's routing strategy: that of training or of inference, by self.training."""
        memory = self.memory
        view.strategy = memory.routing_strategy_train if self.training else memory.routing_strategy_inference

    def route(self, layer: int, hidden, view):
        """Return a memory layer's chapter indices and weights, stored in view.routing too; None without chapters."""
        view.layer = layer
        if layer not in self.bank_of or not self.memory.use_chapters:
            return None
        view.routing[layer] = self.routers[str(layer)](hidden, view=view, strategy=view.strategy)
        return view.routing[layer][:2]

    def run_layer(self, layer, x, view, *arguments):
        """Return layer(x, view, *arguments), which the backward pass calls again with `recomputes_layers`."""
        cached = view.present is not None or view.past  # a second call would extend the caches again
        if self.recomputes_layers and self.training and torch.is_grad_enabled() and not cached:
            return checkpoint(layer, x, view, *arguments, use_reentrant=False)
        return layer(x, view, *arguments)

    def forward(self, input_ids, attention_mask=None, position_ids=None, segment_ids=None):
        view = View(input_ids, attention_mask, position_ids, segment_ids)
        logits = self.head(self.hidden(input_ids, view))
        return logits, {layer: routing[2].softmax(-1) for layer, routing in view.routing.items()}


class MemoryTransformer(MemoryModel):
    """Decoder with memory layers, trained from scratch.

    Maps input_ids int [batch, time] to logits [batch, time, vocabulary] and chapter probabilities by memory layer.
    """

    def __init__(self, config, memory):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_dim)
        self.insert_memory(memory, config.num_layers, config.hidden_dim, as_set=True)
        self.layers = nn.ModuleList(
            Block(config, memory, i in self.bank_of, self.make_attention) for i in range(config.num_layers)
        )
        self.norm = make_norm(config)
        self.lm_head = nn.Linear(config.hidden_dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def hidden(self, input_ids, view):
        """Return the hidden states after the last norm, [batch, time, width]."""
        self.begin(view)
        x = self.embed_tokens(input_ids)
        for i, layer in enumerate(self.layers):
            routing = self.route(i, x, view)
            bank = self.memory_banks[self.bank_of[i]]() if i in self.bank_of else None
            x = self.run_layer(layer, x, view, bank, routing)
        return self.norm(x)

    def head(self, hidden):
        return self.lm_head(hidden)


class Adapter(nn.Module):
    def __init__(self, config, memory, dropout: float, make_attention=MemoryAttention):
        super().__init__()
        self.memory_layernorm = RMSNorm(config.hidden_size, 1e-6)
        self.memory_attn = make_attention(memory, config.hidden_size, config.num_heads, config.kv_heads, dropout)

    def forward(self, x, view, bank, routing):
        read = self.memory_attn(self.memory_layernorm(x), bank, routing=routing, strategy=view.strategy)
        return x + read.to(x.dtype)


class MemoryAdapter(MemoryModel):
    """Pretrained decoder whose layers also read memory; `base_model` has Hugging Face's keys."""

    def __init__(self, config, memory, base_dtype=torch.float32, dropout: float = 0.0):
        super().__init__()
        self.base_model = CausalLM(config).to(base_dtype)
        if memory.lora:
            apply_lora(self.base_model, memory, self.make_lora)
        self.insert_memory(memory, config.num_layers, config.hidden_size, as_set=False)
        self.memory_adapters = nn.ModuleDict(
            {str(i): Adapter(config, memory, dropout, self.make_attention) for i in self.reading}
        )

    def hidden(self, input_ids, view):
        """Return the hidden states after the last norm, [batch, time, width]."""
        self.begin(view)
        decoder = self.base_model.model
        x = decoder.embed_tokens(input_ids)
        for i, layer in enumerate(decoder.layers):
            view.layer = i
            x = self.run_layer(layer, x, view)
            if i not in self.bank_of:
                continue
            routing = self.route(i, x, view)
            adapter, bank = self.memory_adapters[str(i)], self.memory_banks[self.bank_of[i]]()
            x = self.run_layer(adapter, x, view, bank, routing)
        return decoder.norm(x)

    def head(self, hidden):
        return self.base_model.lm_head(hidden)


def build(config):
    """Return the torch model of a config of either task."""
    if config.model.base_config is None and config.model.base_model_name is None:
        return MemoryTransformer(config.model, config.memory)
    from jaxtrain.systems.memory_lm.adapter import backbone_config, base_dtype

    dtype = getattr(torch, base_dtype(config))
    return MemoryAdapter(backbone_config(config.model), config.memory, dtype, config.model.dropout)


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
    """Return the mean cross-entropy in nats per label, without the router losses."""
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
