"""Attention that torch can differentiate twice, in the calls of a compiled step that torch runs."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from torch_bridge.lowering.python.names import mentions

_FAST = (torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention)
_ASK = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)


class _Formula(TorchFunctionMode):
    """Let attention be computed by its formula, in `context`, once the loss asks for the gradient by a tensor."""

    def __init__(self, context: contextlib.ExitStack) -> None:
        super().__init__()
        self._context, self._asked = context, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ASK and not self._asked:
            self._asked = True
            self._context.enter_context(sdpa_kernel(SDPBackend.MATH))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def twice_differentiable(modules: Iterable[torch.nn.Module], loss: Callable) -> Iterator[None]:
    """Inside the context, let a loss take gradients of gradients through attention: the second derivative of torch's
    fused kernels "is not implemented". modules: those that the loss is called with.

    Nothing is changed for a loss that asks for no gradient, as a mode costs time, and while a module evaluates
    attention: under a mode torch leaves its fast path, with other numbers at padding."""
    parts = (inner for module in modules for inner in module.modules())
    if not mentions(loss, "grad") or any(not inner.training and isinstance(inner, _FAST) for inner in parts):
        yield
        return
    with contextlib.ExitStack() as context, _Formula(context):
        yield
