"""The original's five standalone routing helpers, in torch.

They use only a router's weights and ignore shared chapters, masks and scaling. The models do not use them; they route
with torch_memory.Router.
"""

import torch

from jaxtrain.errors import UserError


class SequenceRouter:
    """Router with one choice from the mean over the whole input."""

    def __init__(self, router, top_k: int, window_size: int = 128):
        self.router, self.top_k, self.window_size = router, top_k, window_size

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return indices and weights [batch, k] for hidden [batch, time, width]."""
        return self._choose(hidden.mean(1))

    def _choose(self, pooled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, indices = self.router.router(pooled).softmax(-1).topk(self.top_k, -1)
        return indices, weights / weights.sum(-1, keepdim=True)


class SequenceRollingRouter(SequenceRouter):
    """Router with one choice from the mean of the running means over `window_size` tokens."""

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ones = torch.ones(hidden.shape[:2], device=hidden.device)
        return self._choose(self.router.mean(hidden, ones, self.window_size))


class TokenRouter(SequenceRouter):
    """Router with one choice per token: indices and weights [batch, time, k]."""

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._choose(hidden)


class RollingRouter(SequenceRouter):
    """Router with one choice from the mean over the last `window_size` states of all calls since `reset`."""

    def __init__(self, router, top_k: int, window_size: int = 128):
        super().__init__(router, top_k, window_size)
        self.cache: torch.Tensor | None = None

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states = hidden if self.cache is None else torch.cat([self.cache, hidden], 1)
        self.cache = states[:, -self.window_size :]
        return self._choose(self.cache.mean(1))

    def reset(self) -> None:
        self.cache = None


class HybridRouter(RollingRouter):
    """Router that pools the whole prompt first, and a rolling window after `start_generation`."""

    def __init__(self, router, top_k: int, window_size: int = 128):
        super().__init__(router, top_k, window_size)
        self.generating = False

    def start_generation(self, hidden: torch.Tensor) -> None:
        """Switch to the rolling window, which starts with the last states of the prompt `hidden`."""
        self.generating = True
        self.cache = hidden[:, -self.window_size :]

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().route(hidden) if self.generating else self._choose(hidden.mean(1))

    def reset(self) -> None:
        super().reset()
        self.generating = False


ROUTERS = {
    "sequence": SequenceRouter,
    "sequence-rolling": SequenceRollingRouter,
    "rolling": RollingRouter,
    "token": TokenRouter,
    "hybrid": HybridRouter,
}


def create_inference_router(router, strategy: str, top_k: int, window_size: int = 128):
    """Return the helper of a strategy, which chooses top_k chapters by the logits of `router`, a ChapterRouter.

    Raises UserError, a ValueError, for an unknown strategy, another router, and a top_k that it cannot choose.
    """
    if not isinstance(getattr(router, "router", None), torch.nn.Module):
        raise UserError(f"router: got {type(router).__name__}, wanted a ChapterRouter; the strategy comes second")
    name = str(strategy).replace("_", "-")
    if name not in ROUTERS:
        raise UserError(f"routing strategy {strategy!r} is unknown, wanted one of {', '.join(ROUTERS)}")
    if not 0 < top_k <= router.num_chapters:
        raise UserError(f"top_k: {top_k}, wanted 1 to num_chapters={router.num_chapters}")
    return ROUTERS[name](router, top_k, window_size)
