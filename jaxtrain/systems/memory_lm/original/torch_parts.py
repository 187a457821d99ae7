"""Parts of the original's models as torch modules, and the router losses."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from jaxtrain.errors import UserError
from jaxtrain.systems.memory_lm import torch_backbone, torch_memory
from jaxtrain.systems.memory_lm.config import Memory

LOSSES = ("load_balance", "auxiliary", "z_loss")


# --- router's losses ---------------------------------------------------------------------------------------------


def router_losses(indices: torch.Tensor, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return load_balance, auxiliary, z_loss and entropy for indices [..., k] and logits [..., chapter].

    The formulas are those of `router.router_losses`, over all rows.
    """
    chapters = logits.shape[-1]
    logits = logits.reshape(-1, chapters).float()
    p = logits.softmax(-1)
    chosen = functional.one_hot(indices.reshape(len(logits), -1), chapters).sum(1).to(p.dtype)
    return {
        "load_balance": chapters * (chosen.mean(0).detach() * p.mean(0)).sum(),
        "auxiliary": (p.square().mean(0) - 1 / chapters).square().mean(),
        "z_loss": logits.logsumexp(-1).square().mean(),
        "entropy": -(p * p.clamp_min(1e-12).log()).sum(-1).mean(),
    }


def compute_total_router_loss(
    losses: Mapping[str, Any], load_balance_coef: float, auxiliary_coef: float, z_loss_coef: float
) -> torch.Tensor:
    """Return the sum of one layer's losses times their coefficients; skips coefficients <= 0 and missing losses."""
    scale = zip(LOSSES, (load_balance_coef, auxiliary_coef, z_loss_coef), strict=True)
    terms = (torch.as_tensor(losses[name]) * c for name, c in scale if c > 0 and name in losses)
    return sum(terms, torch.zeros(()))


def compute_router_auxiliary_loss(
    router_losses: Sequence[Mapping[str, Any]],
    load_balance_coef: float = 0.01,
    auxiliary_coef: float = 0.0,
    z_loss_coef: float = 0.0,
) -> torch.Tensor:
    """Return `compute_total_router_loss` averaged over the layers that have losses; 0 if none has.

    router_losses: one dict of tensors or numbers per layer, empty for a layer without losses.
    """
    scale = (load_balance_coef, auxiliary_coef, z_loss_coef)
    totals = [compute_total_router_loss(terms, *scale) for terms in router_losses if terms]
    return torch.stack(totals).mean() if totals else torch.zeros(())


# --- parts -------------------------------------------------------------------------------------------------------


class ChapterRouter(torch_memory.Router):
    """Router that chooses `top_k` of `num_chapters` chapters.

    It never chooses the first exclude_prefix_chapters, because all tokens read them. Raises UserError if top_k is not
    in 1..num_chapters.
    """

    def __init__(
        self,
        hidden_dim: int,
        num_chapters: int,
        top_k: int,
        exclude_prefix_chapters: int = 0,
        rolling_window_size: int = 128,
    ):
        if not 0 < top_k <= num_chapters:
            raise UserError(f"top_k: {top_k}, wanted 1 to num_chapters={num_chapters}")
        section = Memory(
            num_chapters=num_chapters,
            top_k_chapters=top_k,
            num_shared_chapters=exclude_prefix_chapters,
            routing_window_size=rolling_window_size,
        )
        self._build(section, hidden_dim)

    @classmethod
    def of(cls, section: Any, hidden_dim: int) -> "ChapterRouter":
        """Return the router of a section `memory`, as a model uses it."""
        router = cls.__new__(cls)
        router._build(section, hidden_dim)
        return router

    def _build(self, section: Any, hidden_dim: int) -> None:
        torch_memory.Router.__init__(self, section, hidden_dim)
        self.hidden_dim, self.num_chapters, self.top_k = hidden_dim, section.num_chapters, section.top_k_chapters
        self.exclude_prefix_chapters = section.num_shared_chapters
        self.rolling_window_size = section.routing_window_size

    def forward(self, hidden_states, routing_strategy: Any = "sequence", strategy: str | None = None):  # type: ignore[override]
        """Return indices and weights [batch, k], and the router losses, for hidden_states [batch, time, width].

        `token` uses the mean of the tokens' logits; see `route_token_level` for one choice per token. A model instead
        passes its View and `strategy`, and gets logits in place of losses. Raises UserError for an unknown strategy.
        """
        if strategy is not None:
            return super().forward(hidden_states, routing_strategy, strategy)
        name = routing_strategy.replace("_", "-")
        if name not in ("sequence", "sequence-rolling", "token"):
            raise UserError(
                f"routing strategy {routing_strategy!r} is unknown, wanted sequence, sequence-rolling or token"
            )
        ones = torch.ones(hidden_states.shape[:2], device=hidden_states.device)
        window = self.memory.routing_window_size if name == "sequence-rolling" else None
        return self._chosen(self.mean(hidden_states, ones, window))  # a Linear commutes with the mean

    def route_token_level(self, hidden_states):
        """Return one choice per token: indices and weights [batch, time, k], and the router losses."""
        return self._chosen(hidden_states)

    def _chosen(self, pooled):
        indices, weights, logits = self.choose(self.router(pooled))
        return indices, weights, router_losses(indices, logits)


class MemoryCrossAttention(torch_memory.MemoryAttention):
    """Cross-attention from the residual stream to memory tokens, [token, width] or [batch, token, width].

    memory_dim: width of the memory vectors. projection_rank: of low-rank projections; None for full ones.
    """

    def __init__(
        self,
        hidden_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        memory_dim: int | None = None,
        dropout: float = 0.0,
        projection_rank: int | None = None,
    ):
        section = Memory(
            memory_dim=memory_dim,
            use_low_rank_projections=projection_rank is not None,
            projection_rank=projection_rank or 1,
        )
        self._build(section, hidden_dim, num_heads, num_kv_heads or num_heads, dropout)

    @classmethod
    def of(cls, section: Any, hidden_dim: int, heads: int, kv_heads: int, dropout: float) -> "MemoryCrossAttention":
        """Return the attention of a section `memory`, for a model with so many heads."""
        attention = cls.__new__(cls)
        attention._build(section, hidden_dim, heads, kv_heads, dropout)
        return attention

    def _build(self, section: Any, hidden_dim: int, heads: int, kv_heads: int, dropout: float) -> None:
        torch_memory.MemoryAttention.__init__(self, section, hidden_dim, heads, kv_heads, dropout)
        self.hidden_dim, self.head_dim = hidden_dim, self.head
        self.num_heads, self.num_kv_heads = section.memory_num_heads or heads, section.memory_num_kv_heads or kv_heads
        self.memory_dim = torch_memory.bank_width(section, hidden_dim)
        self.projection_rank = section.projection_rank if self.low_rank else None

    def forward(self, hidden_states, memory, routing=None, strategy: str | None = None):  # type: ignore[override]
        """Return the memory's contribution, [batch, time, width]. A model also passes its routing and strategy."""
        if strategy is not None:
            return super().forward(hidden_states, memory, routing, strategy)
        memory = memory if memory.ndim == 3 else memory.expand(len(hidden_states), -1, -1)
        return self.project("o", self.attend(self.heads("q", hidden_states), memory).flatten(2))


class LoRALinear(torch_backbone.LoRALinear):
    """Linear with LoRA: y = x W^T + b + (drop(x) A^T) B^T alpha / rank; W and b are frozen."""

    def __init__(self, linear: nn.Linear, rank: int = 16, alpha: float = 32, dropout: float = 0.05):
        super().__init__(linear, rank, alpha, dropout)
        self.weight.requires_grad_(False)
        if self.bias is not None:
            self.bias.requires_grad_(False)

    @classmethod
    def from_linear(cls, linear: nn.Linear, rank: int = 16, alpha: float = 32, dropout: float = 0.05) -> "LoRALinear":
        """Return a LoRALinear that shares the weights of `linear`."""
        return cls(linear, rank, alpha, dropout)
