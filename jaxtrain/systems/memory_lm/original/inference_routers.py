"""The original's five standalone routing helpers, in torch.

They use only a router's weights and ignore shared chapters, masks and scaling. The models do not use them; they route
with torch_memory.Router.
"""

import torch

from jaxtrain.errors import UserError


class SequenceRouter:
    """Router with one choice from the mean over the whole input."""

    def __init__(self, router, window_size: int = 128):
        self.router = router
        self.window_size = window_size

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return indices and weights [batch, k] for hidden [batch, time, width]."""
        return self._choose(hidden.mean(1))

    def _choose(self, pooled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, indices = self.router.router(pooled).softmax(-1).topk(self.router.top_k, -1)
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

    def __init__(self, router, window_size: int = 128):
        super().__init__(router, window_size)
        self.cache: torch.Tensor | None = None

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states = hidden if self.cache is None else torch.cat([self.cache, hidden], 1)
        self.cache = states[:, -self.window_size :]
        return self._choose(self.cache.mean(1))

    def reset(self) -> None:
        self.cache = None


class HybridRouter(RollingRouter):
    """Router that pools the whole prompt first, and a rolling window after `start_generation`."""

    def __init__(self, router, window_size: int = 128):
        super().__init__(router, window_size)
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


def create_inference_router(strategy: str, router, window_size: int = 128):
    """Return the helper of a strategy. router: a ChapterRouter. Raises UserError for an unknown strategy."""
    name = strategy.replace("_", "-")
    if name not in ROUTERS:
        raise UserError(f"routing strategy {strategy!r} is unknown, wanted one of {', '.join(ROUTERS)}")
    return ROUTERS[name](router, window_size)
