"""Pretrained decoders in plain torch with Hugging Face's keys: masked attention, rotary positions, LoRA."""

import math

import torch
from torch import nn
from torch.nn import functional

ACTIVATIONS = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


class Linear(nn.Linear):
    """Linear that computes in the weight's dtype, as jaxtrain.nn.Linear does: a bfloat16 base model gets float32 inputs
    from its adapters."""

    def forward(self, x):
        return functional.linear(x.to(self.weight.dtype), self.weight, self.bias)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        return (x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


def rotate(x, angles, scale: float = 1.0):
    """Apply rotary positions to x [batch, time, head, width]; angles: [batch, time, width / 2]."""
    angles = torch.cat([angles, angles], -1)[:, :, None]
    first, second = x.chunk(2, -1)
    turned = x * (angles.cos() * scale) + torch.cat([-second, first], -1) * (angles.sin() * scale)
    return turned.to(x.dtype)


def attention(q, k, v, mask=None, dropout: float = 0.0):
    """Return the attention of q, k, v, [batch, time, head, width]; k and v may have fewer heads.

    mask: bool [batch, 1, query, key]; a query that sees no key gives 0. dropout: rate for the probabilities.
    """
    groups = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    p = scores.softmax(-1)
    if mask is not None:
        p = p.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    p = functional.dropout(p, dropout) if dropout else p
    return (p @ v).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, config, window):
        super().__init__()
        width, heads, kv = config.hidden_size, config.num_heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = Linear(width, heads, bias=config.qkv_bias)
        self.k_proj = Linear(width, kv, bias=config.qkv_bias)
        self.v_proj = Linear(width, kv, bias=config.qkv_bias)
        self.o_proj = Linear(heads, width, bias=config.out_bias)
        if config.head_norms:
            self.q_norm, self.k_norm = (RMSNorm(config.head_dim, config.norm_eps) for _ in range(2))
        self.config, self.window = config, window

    def forward(self, x, view):
        config = self.config
        q, k, v = (p(x).unflatten(-1, (-1, config.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if config.head_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        angles = view.positions[..., None].float() * torch.tensor(config.inv_freq, dtype=torch.float32, device=x.device)
        q, k = rotate(q, angles, config.attention_scale), rotate(k, angles, config.attention_scale)
        k, v = view.extend(k, v)
        mask = view.mask
        if self.window is not None:
            position = torch.arange(k.shape[1], device=x.device)
            mask = mask & (position[None] > position[view.start :, None] - self.window)
        return self.o_proj(attention(q, k, v, mask).flatten(2))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x):
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config, window):
        super().__init__()
        self.self_attn = Attention(config, window)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x, view):
        x = x + self.self_attn(self.input_layernorm(x), view)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, window) for window in config.windows)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


class CausalLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.model = Decoder(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight


class LoRALinear(nn.Module):
    """Linear with LoRA: y = x W^T + b + (drop(x) A^T) B^T alpha / rank; W and b take no gradient."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float, dropout: float):
        super().__init__()
        self.build(linear.weight, linear.bias, rank, alpha, dropout)

    def build(self, weight: nn.Parameter, bias: nn.Parameter | None, rank: int, alpha: float, dropout: float) -> None:
        self.out_features, self.in_features = weight.shape
        self.rank, self.alpha = rank, alpha
        self.weight = weight
        self.register_parameter("bias", bias)
        self.lora_A = nn.Parameter(torch.zeros(rank, self.in_features))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scaling, self.lora_dropout = alpha / rank, nn.Dropout(dropout)
        self.merged = False

    @torch.no_grad()
    def merge(self) -> None:
        """Add the LoRA update to the weight, once; forward then uses only the weight."""
        if not self.merged:
            self._add(1.0)
            self.merged = True

    @torch.no_grad()
    def unmerge(self) -> None:
        """Take a merged update out of the weight again."""
        if self.merged:
            self._add(-1.0)
            self.merged = False

    def _add(self, sign: float) -> None:
        update = (self.lora_B.float() @ self.lora_A.float()) * (sign * self.scaling)
        self.weight = nn.Parameter((self.weight + update).to(self.weight.dtype), requires_grad=False)

    def forward(self, x):
        y = functional.linear(x.to(self.weight.dtype), self.weight, self.bias)
        if self.merged:
            return y
        x = self.lora_dropout(x).to(self.lora_A.dtype)
        update = functional.linear(functional.linear(x, self.lora_A), self.lora_B)
        return y + (update * self.scaling).to(y.dtype)


def apply_lora(model: nn.Module, memory, make=LoRALinear) -> None:
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and any(target in name for target in memory.lora_targets):
            parent = model.get_submodule(name.rpartition(".")[0])
            layer = make(module, memory.lora_rank, memory.lora_alpha, memory.lora_dropout)
            setattr(parent, name.rpartition(".")[2], layer)
