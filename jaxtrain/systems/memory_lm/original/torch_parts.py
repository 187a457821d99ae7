"""Parts of the original's models as torch modules, and the router losses."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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
    numbers = torch.arange(chapters, device=indices.device)
    chosen = (indices.reshape(len(logits), -1, 1) == numbers).sum(1).to(p.dtype)  # one_hot would check its indices
    return {
        "load_balance": chapters * (chosen.mean(0).detach() * p.mean(0)).sum(),
        "auxiliary": (p.square().mean(0) - 1 / chapters).square().mean(),
        "z_loss": logits.logsumexp(-1).square().mean(),
        "entropy": -(p * p.clamp_min(1e-12).log()).sum(-1).mean(),
    }


def compute_total_router_loss(
    losses: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    load_balance_coef: float = 0.01,
    auxiliary_coef: float = 0.0,
    z_loss_coef: float = 0.0,
    reference_tensor: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sum of a layer's losses times their coefficients; of a list of layers, the mean of those with losses.

    Skips coefficients <= 0 and missing losses; without any it is 0. reference_tensor: its device and dtype are the
    result's.
    """
    if not isinstance(losses, Mapping):
        scale = (load_balance_coef, auxiliary_coef, z_loss_coef, reference_tensor)
        totals = [compute_total_router_loss(terms, *scale) for terms in losses if terms]
        return torch.stack(totals).mean() if totals else compute_total_router_loss({}, *scale)
    scale = zip(LOSSES, (load_balance_coef, auxiliary_coef, z_loss_coef), strict=True)
    terms = (torch.as_tensor(losses[name]) * c for name, c in scale if c > 0 and name in losses)
    total = sum(terms, torch.zeros(()))
    return total if reference_tensor is None else total.to(reference_tensor)


def compute_router_auxiliary_loss(
    router_losses: Sequence[Mapping[str, Any]],
    load_balance_coef: float = 0.01,
    auxiliary_coef: float = 0.0,
    z_loss_coef: float = 0.0,
) -> torch.Tensor:
    """Return `compute_total_router_loss` averaged over the layers that have losses; 0 if none has.

    router_losses: one dict of tensors or numbers per layer, empty for a layer without losses.
    """
    return compute_total_router_loss(list(router_losses), load_balance_coef, auxiliary_coef, z_loss_coef)


# --- parts -------------------------------------------------------------------------------------------------------


STRATEGIES = ("sequence", "sequence-rolling", "token")


class ChapterRouter(torch_memory.Router):
    """Router that chooses `top_k` of `num_chapters` chapters for hidden states.

    routing_strategy: sequence, sequence-rolling or token. Raises UserError, a ValueError, for another one, and if top_k
    is not in 1..num_chapters.
    """

    def __init__(self, hidden_dim: int, num_chapters: int, top_k: int = 1, routing_strategy: str = "sequence"):
        if not 0 < top_k <= num_chapters:
            raise UserError(f"top_k: {top_k}, wanted 1 to num_chapters={num_chapters}")
        self._build(Memory(num_chapters=num_chapters, top_k_chapters=top_k), hidden_dim, routing_strategy)

    @classmethod
    def of(cls, section: Any, hidden_dim: int) -> "ChapterRouter":
        """Return the router of a section `memory`, as a model uses it."""
        router = cls.__new__(cls)
        name = section.routing_strategy_train
        router._build(section, hidden_dim, name if name in STRATEGIES else "sequence")
        return router

    def _build(self, section: Any, hidden_dim: int, routing_strategy: str) -> None:
        torch_memory.Router.__init__(self, section, hidden_dim)
        self.hidden_dim, self.num_chapters, self.top_k = hidden_dim, section.num_chapters, section.top_k_chapters
        self.routing_strategy = routing_strategy.replace("_", "-")
        if self.routing_strategy not in STRATEGIES:
            raise UserError(f"routing_strategy: {routing_strategy!r} is unknown, wanted one of {', '.join(STRATEGIES)}")

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        return_losses: bool = True,
        exclude_prefix_chapters: int = 0,
        rolling_window_size: int | None = None,
        *,
        view: torch_memory.View | None = None,
        strategy: str | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Return indices and weights [batch, k], and the router losses, for hidden_states [batch, time, width].

        `token` uses the mean of the tokens' logits; see `route_token_level` for one choice per token. return_losses:
        False gives {} for the losses. exclude_prefix_chapters: never choose the first so many. rolling_window_size: of
        sequence-rolling, by default the section's, 128. A model instead passes view and strategy, and gets logits in
        place of losses.
        """
        if view is not None:
            return super().forward(hidden_states, view, strategy)
        ones = torch.ones(hidden_states.shape[:2], device=hidden_states.device)
        window = self.memory.routing_window_size if rolling_window_size is None else rolling_window_size
        window = window if self.routing_strategy == "sequence-rolling" else None
        pooled = self.mean(hidden_states, ones, window)  # a Linear commutes with the mean
        return self._chosen(pooled, return_losses, exclude_prefix_chapters)

    def route_token_level(
        self, hidden_states: torch.Tensor, return_losses: bool = True, exclude_prefix_chapters: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return one choice per token: indices and weights [batch, time, k], and the router losses."""
        return self._chosen(hidden_states, return_losses, exclude_prefix_chapters)

    def _chosen(self, pooled, return_losses: bool, shared: int):
        if not 0 <= shared <= self.num_chapters:
            raise UserError(f"exclude_prefix_chapters: {shared}, wanted 0 to num_chapters={self.num_chapters}")
        indices, weights, logits = self.choose(self.router(pooled), shared)
        return indices, weights, router_losses(indices, logits) if return_losses else {}


class MemoryCrossAttention(torch_memory.MemoryAttention):
    """Cross-attention from the residual stream to memory tokens, [token, width] or [batch, token, width].

    memory_dim: width of the memory vectors. use_low_rank_projections: of rank projection_rank, which it then needs.
    reduced_dim_mode: work in a width of reduced_dim, that of the memory vectors; memory_dim and low-rank projections do
    not count. wo_init_zero: the output projection starts at zero. gradient_checkpointing: recompute in the backward
    pass. use_flash_attention: torch chooses the kernel.
    """

    def __init__(
        self,
        hidden_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        memory_dim: int | None = None,
        use_low_rank_projections: bool = False,
        projection_rank: int | None = None,
        reduced_dim_mode: bool = False,
        reduced_dim: int | None = None,
        wo_init_zero: bool = True,
        dropout: float = 0.0,
        use_flash_attention: bool = True,
        gradient_checkpointing: bool = False,
    ):
        for name, enabled in (("projection_rank", use_low_rank_projections), ("reduced_dim", reduced_dim_mode)):
            if enabled and {"projection_rank": projection_rank, "reduced_dim": reduced_dim}[name] is None:
                raise UserError(f"{name}: missing; the other option that is on needs it")
        section = Memory(
            memory_dim=memory_dim,
            use_low_rank_projections=use_low_rank_projections,
            projection_rank=projection_rank or 1,
            use_low_rank_memory=reduced_dim_mode,
            low_rank_mode="reduced_dim" if reduced_dim_mode else "factorized",
            memory_rank=reduced_dim or 1,
        )
        self._build(section, hidden_dim, num_heads, num_kv_heads or num_heads, dropout)
        self.use_flash_attention, self.gradient_checkpointing = use_flash_attention, gradient_checkpointing
        if wo_init_zero:
            nn.init.zeros_(self.output.weight)

    @classmethod
    def of(cls, section: Any, hidden_dim: int, heads: int, kv_heads: int, dropout: float) -> "MemoryCrossAttention":
        """Return the attention of a section `memory`, for a model with so many heads."""
        attention = cls.__new__(cls)
        attention._build(section, hidden_dim, heads, kv_heads, dropout)
        attention.gradient_checkpointing = section.memory_gradient_checkpointing
        return attention

    def _build(self, section: Any, hidden_dim: int, heads: int, kv_heads: int, dropout: float) -> None:
        torch_memory.MemoryAttention.__init__(self, section, hidden_dim, heads, kv_heads, dropout)
        self.hidden_dim, self.head_dim, self.scale = hidden_dim, self.head, self.head**-0.5
        self.num_heads, self.num_kv_heads = section.memory_num_heads or heads, section.memory_num_kv_heads or kv_heads
        self.num_kv_groups, self.kv_hidden_dim = self.num_heads // self.num_kv_heads, self.num_kv_heads * self.head
        self.memory_dim = torch_memory.bank_width(section, hidden_dim)
        self.reduced_dim_mode = section.use_low_rank_memory and section.low_rank_mode == "reduced_dim"
        self.reduced_dim = section.memory_rank if self.reduced_dim_mode else None
        self.use_low_rank_projections = self.low_rank
        self.projection_rank = section.projection_rank if self.low_rank else None
        self.use_flash_attention, self.gradient_checkpointing = True, False

    @property
    def attn_dropout(self) -> float:
        """Return the share of attention probabilities that training drops."""
        return self.dropout

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        memory: torch.Tensor | None = None,
        token_routing_state: Any = None,
        token_routing_kernel_version: str = "v2",
        return_attn_weights: bool = False,
        *,
        routing: Any = None,
        strategy: str | None = None,
    ) -> torch.Tensor:
        """Return the memory's contribution, [batch, time, width].

        token_routing_kernel_version: not used, as one exact formula serves all. Raises UserError, a ValueError, without
        memory, and for token_routing_state and return_attn_weights, which are not supported. A model also passes
        routing and strategy.
        """
        if strategy is not None:
            return self._recomputed(super().forward, hidden_states, memory, routing, strategy)
        if memory is None:
            raise UserError("memory: missing; pass a bank's get_memory(), [token, width] or [batch, token, width]")
        if token_routing_state is not None or return_attn_weights:
            raise UserError("token_routing_state, return_attn_weights: not supported; the models route by themselves")
        memory = memory if memory.ndim == 3 else memory.expand(len(hidden_states), -1, -1)
        return self._recomputed(self._attended, hidden_states, memory)

    def _recomputed(self, function, *arguments):
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(function, *arguments, use_reentrant=False)
        return function(*arguments)

    def _attended(self, hidden_states, memory):
        return self.project("o", self.attend(self.heads("q", hidden_states), memory).flatten(2))


class LoRALinear(torch_backbone.LoRALinear):
    """Linear with LoRA: y = x W^T + b + (drop(x) A^T) B^T alpha / rank; W and b are frozen.

    merge_weights: eval() merges the update into W, train() takes it out again; the values are the same.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int = 16,
        alpha: float = 32,
        dropout: float = 0.0,
        merge_weights: bool = False,
        bias: bool = False,
    ):
        linear = nn.Linear(in_features, out_features, bias)
        super().__init__(linear, rank, alpha, dropout)
        self._freeze(merge_weights)

    @classmethod
    def from_linear(cls, linear: nn.Linear, rank: int = 16, alpha: float = 32, dropout: float = 0.0) -> "LoRALinear":
        """Return a LoRALinear that shares the weights of `linear`."""
        layer = cls.__new__(cls)
        torch_backbone.LoRALinear.__init__(layer, linear, rank, alpha, dropout)
        layer._freeze(False)
        return layer

    def _freeze(self, merge_weights: bool) -> None:
        self.merge_weights, self.has_bias = merge_weights, self.bias is not None
        self.weight.requires_grad_(False)
        if self.bias is not None:
            self.bias.requires_grad_(False)

    def train(self, mode: bool = True) -> "LoRALinear":
        if self.merge_weights:
            self.unmerge() if mode else self.merge()
        return super().train(mode)
