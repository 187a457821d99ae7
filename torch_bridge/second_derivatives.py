"""Attention that torch can differentiate twice, in the calls of a compiled step that torch runs."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

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
def twice_differentiable() -> Iterator[None]:
    """Inside the context, let a loss take gradients of gradients through attention: the second derivative of torch's
    fused kernels "is not implemented"."""
    with contextlib.ExitStack() as context, _Formula(context):
        yield
