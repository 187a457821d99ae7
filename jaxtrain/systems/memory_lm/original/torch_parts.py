"""The parts of the original's models as torch modules, and the router's losses."""

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
    """load_balance, auxiliary, z_loss and entropy of a choice: indices [..., k], logits [..., chapter].

    The formulas of `router.router_losses`, over all rows.
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
    """One layer's terms times their coefficients. Coefficients <= 0 and absent terms count nothing."""
    scale = zip(LOSSES, (load_balance_coef, auxiliary_coef, z_loss_coef), strict=True)
    terms = (torch.as_tensor(losses[name]) * c for name, c in scale if c > 0 and name in losses)
    return sum(terms, torch.zeros(()))


def compute_router_auxiliary_loss(
    router_losses: Sequence[Mapping[str, Any]],
    load_balance_coef: float = 0.01,
    auxiliary_coef: float = 0.0,
    z_loss_coef: float = 0.0,
) -> torch.Tensor:
    """The terms of each layer times their coefficients, averaged over the layers that have any; 0 for none.

    router_losses: dicts of tensors or numbers. Coefficients <= 0 and absent terms count nothing.
    """
    scale = (load_balance_coef, auxiliary_coef, z_loss_coef)
    totals = [compute_total_router_loss(terms, *scale) for terms in router_losses if terms]
    return torch.stack(totals).mean() if totals else torch.zeros(())


# --- parts -------------------------------------------------------------------------------------------------------


class ChapterRouter(torch_memory.Router):
    """Choose `top_k` of `num_chapters` chapters; the first exclude_prefix_chapters, which all tokens read, never.

    Raises UserError where top_k does not fit.
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
        """The router that a section `memory` describes, for a model."""
        router = cls.__new__(cls)
        router._build(section, hidden_dim)
        return router

    def _build(self, section: Any, hidden_dim: int) -> None:
        torch_memory.Router.__init__(self, section, hidden_dim)
        self.hidden_dim, self.num_chapters, self.top_k = hidden_dim, section.num_chapters, section.top_k_chapters
        self.exclude_prefix_chapters = section.num_shared_chapters
        self.rolling_window_size = section.routing_window_size

    def forward(self, hidden_states, routing_strategy: Any = "sequence", strategy: str | None = None):  # type: ignore[override]
        """hidden_states: [batch, time, width] -> indices and weights [batch, k], and the losses; `token` takes the mean
        of the tokens' logits, see `route_token_level`. A model passes its View and a strategy, and gets logits."""
        if strategy is not None:
            return super().forward(hidden_states, routing_strategy, strategy)
        name = routing_strategy.replace("_", "-")
        if name not in ("sequence", "sequence-rolling", "token"):
            raise UserError(
                f"routing strategy {routing_strategy!r} is unknown, wanted sequence, sequence-rolling or token"
            )
        ones = torch.ones(hidden_states.shape[:2], device=hidden_states.device)
        window = self.memory.routing_window_size if name == "sequence-rolling" else None
        return self._chosen(self.mean(hidden_states, ones, window))  # the router is linear: its mean is the mean's

    def route_token_level(self, hidden_states):
        """One choice per token: indices and weights [batch, time, k], and the losses."""
        return self._chosen(hidden_states)

    def _chosen(self, pooled):
        indices, weights, logits = self.choose(self.router(pooled))
        return indices, weights, router_losses(indices, logits)


class MemoryCrossAttention(torch_memory.MemoryAttention):
    """Queries from the stream, keys and values from memory tokens [token, width] or [batch, token, width].

    memory_dim: of the memory's vectors. projection_rank: of low-rank projections; None for full ones.
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
        """The attention that a section `memory` describes, for a model of so many heads."""
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
        """Read the memory: [batch, time, width]. A model passes its routing and a strategy."""
        if strategy is not None:
            return super().forward(hidden_states, memory, routing, strategy)
        memory = memory if memory.ndim == 3 else memory.expand(len(hidden_states), -1, -1)
        return self.project("o", self.attend(self.heads("q", hidden_states), memory).flatten(2))


class LoRALinear(torch_backbone.LoRALinear):
    """y = x W^T + b + (drop(x) A^T) B^T alpha / rank; W and b are frozen."""

    def __init__(self, linear: nn.Linear, rank: int = 16, alpha: float = 32, dropout: float = 0.05):
        super().__init__(linear, rank, alpha, dropout)
        self.weight.requires_grad_(False)
        if self.bias is not None:
            self.bias.requires_grad_(False)

    @classmethod
    def from_linear(cls, linear: nn.Linear, rank: int = 16, alpha: float = 32, dropout: float = 0.05) -> "LoRALinear":
        """The LoRA of a layer, which keeps its weights."""
        return cls(linear, rank, alpha, dropout)
