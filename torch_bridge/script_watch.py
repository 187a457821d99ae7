"""Watch a plain torch script's first updates: which modules it calls and whether they convert."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from jaxtrain.errors import UserError
from torch_bridge.from_torch import from_torch
from torch_bridge.lowering import UnsupportedModel


class Watch:
    """The outermost modules that are called with gradients, with the arguments of their first call. updates: how many
    torch optimizers have made."""

    def __init__(self) -> None:
        self.called: dict[int, tuple[torch.nn.Module, tuple, dict]] = {}
        self.updates = 0
        self._depth = 0

    @contextlib.contextmanager
    def watching(self, after_update: Callable[[int], None]) -> Iterator[None]:
        """Watch inside the context. after_update: called with the number of updates so far."""

        def enter(module: torch.nn.Module, args: tuple) -> None:
            learns = any(p.requires_grad for p in module.parameters())
            if not self._depth and learns and torch.is_grad_enabled() and id(module) not in self.called:
                self.called[id(module)] = module, args, {}
            self._depth += 1

        def leave(module: torch.nn.Module, args: tuple, output: Any) -> None:
            self._depth -= 1

        def updated(optimizer: Any, args: Any, kwargs: Any) -> None:
            self.updates += 1
            after_update(self.updates)

        handles = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
            register_optimizer_step_post_hook(updated),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def conversions(self) -> list[dict[str, Any]]:
        """Return, for every module, whether it is one program and, if not, why, with the lines of its code."""
        found = []
        for module, args, _ in self.called.values():
            row = {"module": type(module).__name__, "parameters": sum(p.numel() for p in module.parameters())}
            try:
                from_torch(module, args)
                found.append({**row, "one_program": True, "why": ""})
            except (UnsupportedModel, UserError, TypeError) as error:
                found.append({**row, "one_program": False, "why": str(error)})
        return found
