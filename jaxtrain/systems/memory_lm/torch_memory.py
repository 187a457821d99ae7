"""The memory in plain torch: banks, router, cross-attention, and the positions, masks and caches of a call."""

import torch
from torch import nn

from jaxtrain.errors import UserError
from jaxtrain.systems.memory_lm.config import check_heads
from jaxtrain.systems.memory_lm.torch_backbone import Linear, attention

PER_TOKEN = ("token", "prefix")


class View:
    """Positions, masks and caches of one call of a model.

    mask: bool [batch, key], keys of earlier calls included; UserError for another width. past: (keys, values) of
    earlier calls by layer. present: a list to which each layer's past and new (keys, values) are appended, or None.
    windows: by layer, the state of the routing strategies rolling and hybrid; None without a cache. routing: (indices,
    weights, logits) by layer, filled by the model.
    """

    def __init__(self, ids, mask=None, positions=None, segments=None, past=None, present=None, windows=None):
        time, device = ids.shape[1], ids.device
        self.start = past[0][0].shape[1] if past else 0
        keys = self.start + time
        if mask is not None and mask.shape[1] != keys:
            raise UserError(
                f"attention_mask: {mask.shape[1]} columns, wanted {keys}: those of the cache and of the input"
            )
        self.full_mask, self.token_mask = mask, None if mask is None else mask[:, -time:]
        places = torch.arange(self.start, keys, device=device)
        self.positions = places[None].expand(len(ids), -1) if positions is None else positions
        self.mask = (torch.arange(keys, device=device)[None] <= places[:, None])[None, None]
        if mask is not None:
            self.mask = self.mask & mask[:, None, None]
        if segments is not None:
            self.mask = self.mask & (segments[:, None, :, None] == segments[:, None, None, :])
        self.segments, self.past, self.present, self.windows = segments, past, present, windows
        self.layer = 0
        self.strategy = "sequence"
        self.routing: dict[int, tuple] = {}

    def extend(self, k, v):
        """Return the keys and values of earlier calls and this one."""
        if self.past:
            k, v = (torch.cat([old, new], 1) for old, new in zip(self.past[self.layer], (k, v), strict=True))
        if self.present is not None:
            self.present.append((k, v))
        return k, v

    def window(self, hidden, size: int):
        """Append block inputs to the layer's window; return the last `size` of all calls, [batch, state, width], and
        their mask [batch, state]."""
        seen = self.windows.get(self.layer)
        states = (hidden.detach() if seen is None else torch.cat([seen, hidden.detach()], 1))[:, -size:]
        self.windows[self.layer] = states
        ones = torch.ones(states.shape[:2], device=states.device)
        return states, ones if self.full_mask is None else self.full_mask[:, -states.shape[1] :].float()


# --- banks -------------------------------------------------------------------------------------------------------


class MemoryBank(nn.Module):
    """Bank with the parameter `memory` [token, width], drawn from N(0, init_std)."""

    bits: int | None = None  # quantisation in eval mode; None: none

    def __init__(self, num_tokens: int, dim: int, init_std: float = 0.02):
        super().__init__()
        self.num_tokens, self.dim, self.init_std = num_tokens, dim, init_std
        self.memory = nn.Parameter(torch.randn(num_tokens, dim) * init_std)

    def get_memory(self) -> torch.Tensor:
        """Return all memory vectors, [token, width]."""
        return self.memory

    def forward(self) -> torch.Tensor:
        bank = self.get_memory()
        return bank if self.training or self.bits is None else QuantizedMemoryBank.of(bank, self.bits).get_memory()


class FactorizedMemoryBank(MemoryBank):
    """Low-rank bank: the memory is A B^T with A [token, rank] and B [width, rank]."""

    def __init__(self, num_tokens: int, dim: int, rank: int, init_std: float = 0.02):
        nn.Module.__init__(self)
        self.num_tokens, self.dim, self.rank, self.init_std = num_tokens, dim, rank, init_std
        self.A = nn.Parameter(torch.randn(num_tokens, rank) * init_std)
        self.B = nn.Parameter(torch.randn(dim, rank) * rank**-0.5)

    def get_memory(self) -> torch.Tensor:
        return self.A @ self.B.T


class ReducedDimMemoryBank(MemoryBank):
    """Bank with `memory` [token, reduced_dim]; attention works in this reduced width."""

    def __init__(self, num_tokens: int, reduced_dim: int, init_std: float = 0.02):
        super().__init__(num_tokens, reduced_dim, init_std)
        self.reduced_dim = reduced_dim


class QuantizedMemoryBank(nn.Module):
    """Bank in 8 or 4 bits, for inference: buffers quantized_memory int8 [token, width or width / 2], scales [token].

    Every row has the scale max|row| / 127 (4 bits: / 7), at least 1e-8; values round half to even. With 4 bits, column
    2j is the low half of a byte, 2j + 1 the high half. memory: what is quantised, [num_tokens, dim]; without it, a draw
    from N(0, init_std). Raises UserError for other bits, for an odd width with 4, and for memory of another shape.
    """

    def __init__(
        self,
        num_tokens: int,
        dim: int,
        quant_bits: int = 8,
        init_std: float = 0.02,
        memory: torch.Tensor | None = None,
    ):
        super().__init__()
        bits, memory = quant_bits, torch.randn(num_tokens, dim) * init_std if memory is None else memory
        if tuple(memory.shape) != (num_tokens, dim):
            raise UserError(f"memory is {list(memory.shape)}, wanted [num_tokens, dim] = {[num_tokens, dim]}")
        self.num_tokens, self.dim, self.quant_bits = num_tokens, dim, quant_bits
        if bits not in (8, 4):
            raise UserError(f"memory.memory_quant_bits: {bits}, wanted 8 or 4")
        if bits == 4 and memory.shape[-1] % 2:
            raise UserError(f"a bank of odd width {memory.shape[-1]} cannot be packed into 4 bits; use 8")
        memory, top = memory.detach().float(), 2 ** (bits - 1) - 1
        scales = (memory.abs().amax(-1) / top).clamp_min(1e-8)
        values = (memory / scales[:, None]).round().clamp(-top - 1, top).to(torch.int8)
        values = values if bits == 8 else (values[:, 0::2] & 0x0F) | (values[:, 1::2] << 4)
        self.register_buffer("quantized_memory", values)
        self.register_buffer("scales", scales)

    @classmethod
    def of(cls, memory: torch.Tensor, bits: int = 8) -> "QuantizedMemoryBank":
        """Return the quantised form of memory [token, width]."""
        return cls(*memory.shape, quant_bits=bits, memory=memory)

    def get_memory(self) -> torch.Tensor:
        """Return all memory vectors, dequantised, float32 [token, width]."""
        values = self.quantized_memory
        if self.quant_bits == 4:
            values = torch.stack([(values << 4) >> 4, values >> 4], -1).flatten(1)
        return values.float() * self.scales[:, None]

    forward = get_memory


class ChapteredMemoryBank(nn.Module):
    """Bank split into chapters of consecutive tokens; its state-dict keys have the prefix `base_bank.`.

    Raises UserError if num_chapters does not divide the number of tokens.
    """

    def __init__(self, base_bank: nn.Module, num_chapters: int):
        super().__init__()
        tokens = len(base_bank.get_memory())
        if tokens % num_chapters:
            raise UserError(f"memory.num_chapters: {tokens} memory tokens are no multiple of {num_chapters} chapters")
        self.base_bank, self.num_chapters = base_bank, num_chapters
        self.tokens_per_chapter = tokens // num_chapters

    def get_memory(self) -> torch.Tensor:
        return self.base_bank.get_memory()

    def get_chapter(self, chapter_idx: int) -> torch.Tensor:
        """Return the memory of one chapter, [token, width]. Raises IndexError for a number out of range."""
        if not 0 <= chapter_idx < self.num_chapters:
            raise IndexError(f"chapter_idx: {chapter_idx}, wanted 0 to {self.num_chapters - 1}")
        return self()[chapter_idx]

    def get_chapters(self, chapter_indices: torch.Tensor) -> torch.Tensor:
        """Return the memory of chapters [..., k], concatenated in this order: [..., k x token, width]."""
        return self()[torch.as_tensor(chapter_indices)].flatten(-3, -2)

    def get_chapters_batched(self, chapter_indices: torch.Tensor) -> torch.Tensor:
        """Return the memory of each row's chapters [batch, k], concatenated: [batch, k x token, width]."""
        return self.get_chapters(chapter_indices)

    def forward(self) -> torch.Tensor:
        return self.base_bank().unflatten(0, (self.num_chapters, -1))


def make_bank(memory, width: int) -> nn.Module:
    """Return the bank of a `memory` section. width: memory_dim, or the model's width."""
    tokens, std = memory.num_memory_tokens, memory.memory_init_std
    if memory.use_low_rank_memory and memory.low_rank_mode == "reduced_dim":
        bank: MemoryBank = ReducedDimMemoryBank(tokens, memory.memory_rank, std)
    elif memory.use_low_rank_memory:
        bank = FactorizedMemoryBank(tokens, width, memory.memory_rank, std)
    else:
        bank = MemoryBank(tokens, width, std)
    bank.bits = memory.memory_quant_bits if memory.quantize_memory else None
    return ChapteredMemoryBank(bank, memory.num_chapters) if memory.use_chapters else bank


def bank_width(memory, width: int) -> int:
    reduced = memory.use_low_rank_memory and memory.low_rank_mode == "reduced_dim"
    return memory.memory_rank if reduced else memory.memory_dim or width


# --- router ------------------------------------------------------------------------------------------------------


class Router(nn.Module):
    def __init__(self, memory, width: int):
        super().__init__()
        self.router = Linear(width, memory.num_chapters)
        self.memory = memory

    def forward(self, hidden, view, strategy):
        """Return chapter indices and weights, [batch, k] or [batch, time, k], and the logits of all chapters."""
        memory = self.memory
        hidden = hidden.to(torch.promote_types(hidden.dtype, self.router.weight.dtype))
        if strategy == "token":
            pooled = hidden
        elif strategy == "prefix":
            pooled = self.prefix(hidden, view)
        elif view.segments is not None:
            window = memory.routing_window_size if strategy == "sequence-rolling" else 1
            pooled = self.document_mean(hidden, view, window)
        elif strategy in ("rolling", "hybrid") and view.windows is not None:
            pooled = self.windowed(hidden, view, strategy)
        else:
            mask = view.token_mask if memory.mask_aware_pooling and view.token_mask is not None else None
            ones = torch.ones(hidden.shape[:2], device=hidden.device) if mask is None else mask.float()
            window = memory.routing_window_size if strategy == "sequence-rolling" else None
            pooled = self.mean(hidden, ones, window)
        return self.choose(self.router(pooled))

    def choose(self, logits, shared: int | None = None):
        """Return indices and weights [..., k] of the most likely chapters that are not shared, and the logits.

        shared: number of the first chapters left out; the memory section's by default.
        """
        memory, shared = self.memory, self.memory.num_shared_chapters if shared is None else shared
        p = logits.softmax(-1)
        p = p[..., shared:] / p[..., shared:].sum(-1, keepdim=True).clamp_min(1e-12)
        weights, indices = p.topk(min(memory.top_k_chapters, p.shape[-1]), -1)
        return indices + shared, weights / weights.sum(-1, keepdim=True).clamp_min(1e-12), logits

    def windowed(self, hidden, view, strategy):
        """Return the mean of the last states of all calls; for hybrid, the first call's mean over the whole prompt."""
        states, real = view.window(hidden, self.memory.routing_window_size)
        if strategy == "hybrid" and view.start == 0:
            ones = torch.ones(hidden.shape[:2], device=hidden.device) if view.token_mask is None else view.token_mask
            return self.mean(hidden, ones.float(), None)
        return self.mean(states, real, None)

    @staticmethod
    def mean(hidden, ones, window):
        if window is not None:
            position = torch.arange(hidden.shape[1], device=hidden.device)
            near = (position[None] <= position[:, None]) & (position[None] > position[:, None] - window)
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


# --- attention ---------------------------------------------------------------------------------------------------


class MemoryAttention(nn.Module):
    def __init__(self, memory, width: int, heads: int, kv_heads: int, dropout: float = 0.0):
        super().__init__()
        self.dropout = dropout if memory.memory_dropout is None else memory.memory_dropout
        heads, kv_heads = memory.memory_num_heads or heads, memory.memory_num_kv_heads or kv_heads
        wide = bank_width(memory, width)
        reduced = memory.use_low_rank_memory and memory.low_rank_mode == "reduced_dim"
        inner = wide if reduced else width
        check_heads(inner, heads, kv_heads)
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

    @property
    def output(self) -> nn.Linear:
        """Return the last projection; it is initialised to zero so that an untrained memory adds nothing."""
        return self.o_up if self.low_rank else self.o_proj

    def project(self, name, x):
        if self.low_rank:
            return getattr(self, f"{name}_up")(getattr(self, f"{name}_down")(x))
        return getattr(self, f"{name}_proj")(x)

    def heads(self, name, x):
        return self.project(name, x).unflatten(-1, (-1, self.head))

    def forward(self, x, bank, routing=None, strategy: str = "sequence"):
        """Read the bank, [token, width] or by chapter [chapter, token, width], for x [batch, time, width]."""
        q = self.heads("q", x)
        if routing is None:
            y = self.attend(q, bank.expand(len(x), -1, -1))
        elif strategy in PER_TOKEN:
            y = self.per_token(q, bank, *routing)
        elif routing[0].ndim == 3:  # packed rows: all tokens of a document share its choice
            rows = self.per_sequence(q.flatten(0, 1)[:, None], bank, *(each.flatten(0, 1) for each in routing))
            y = rows[:, 0].unflatten(0, q.shape[:2])
        else:
            y = self.per_sequence(q, bank, *routing)
        return self.project("o", y.flatten(2))

    def attend(self, q, memory):
        rate = self.dropout if self.training else 0.0
        return attention(q, self.heads("k", memory), self.heads("v", memory), dropout=rate)

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
