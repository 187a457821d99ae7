"""One training step of a torch module by torch itself, in the call form of a compiled one."""

from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch


def recordable(module: Any, optimizer: Any, *called: Any) -> bool:
    """Return True for objects of torch's classes, where nothing else that a step calls is a mock: one that is recorded
    would be called once, and count so."""
    torchs = issubclass(type(module), torch.nn.Module) and issubclass(type(optimizer), torch.optim.Optimizer)
    return torchs and not any(issubclass(type(one), mock.NonCallableMock) for one in called)


class TorchStep:
    """Call with (batch, update): the loss, or (loss, values) as loss_fn(module, batch) gives them, without their graph.

    With `update` gradients are clipped to clip_norm and the optimizer and the scheduler step; without it they are kept
    and summed. lowered: the forward pass runs under torch.autocast in bfloat16. Tensors go to the module's device.
    """

    def __init__(self, module: Any, loss_fn: Callable, optimizer: Any, scheduler: Any, clip_norm, lowered: bool):
        self.module, self.loss_fn, self.optimizer, self.scheduler = module, loss_fn, optimizer, scheduler
        self.clip_norm, self.lowered = clip_norm, lowered

    def __call__(self, batch: Any, update: bool = True) -> Any:
        with self._autocast():
            found = self.loss_fn(self.module, self._moved(batch))
        loss, values = found if isinstance(found, tuple) else (found, {})
        loss.backward()
        if update:
            if self.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.scheduler is not None:
                self.scheduler.step()
        values = {name: value.detach() if hasattr(value, "detach") else value for name, value in values.items()}
        return (loss.detach(), values) if values else loss.detach()

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's outputs in evaluation mode, whose mode stays as it was."""
        training = self.module.training
        self.module.eval()
        try:
            args, kwargs = self._moved(args), self._moved(kwargs)
            return self.module(*args, **kwargs)
        finally:
            self.module.train(training)

    def _autocast(self) -> Any:
        return torch.autocast(self._device().type, torch.bfloat16, enabled=self.lowered)

    def _device(self) -> torch.device:
        parameters = self.module.parameters() if issubclass(type(self.module), torch.nn.Module) else ()
        return next((parameter.device for parameter in parameters), torch.device("cpu"))

    def _moved(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(self._device())
        if isinstance(value, Mapping):
            return {name: self._moved(inner) for name, inner in value.items()}
        return type(value)(map(self._moved, value)) if type(value) in (list, tuple) else value
