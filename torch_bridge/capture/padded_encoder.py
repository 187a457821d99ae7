"""torch.nn.TransformerEncoder as torch runs it without gradients: nested tensors drop padding, outputs there are 0.

Torch does not take that way while it captures. A hook on each encoder, there while it is captured, writes the zeros.
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

_FORWARD = inspect.signature(torch.nn.TransformerEncoder.forward)


@contextlib.contextmanager
def zeros_at_padding(entry: torch.nn.Module, graded: bool) -> Iterator[None]:
    """Inside the context, let encoders of the module write zeros where torch does. graded: gradients may be asked for;
    torch then computes padding as everything else."""
    encoders = [inner for inner in entry.modules() if type(inner) is torch.nn.TransformerEncoder]
    fast = torch.backends.mha.get_fastpath_enabled()
    handles = [
        encoder.register_forward_hook(_zeroed, with_kwargs=True)
        for encoder in (encoders if fast else ())
        if _nests(encoder, graded)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _zeroed(encoder: torch.nn.TransformerEncoder, args: tuple, kwargs: dict, output: torch.Tensor) -> Any:
    given: Any = _FORWARD.bind(encoder, *args, **kwargs).arguments
    padding, src = given.get("src_key_padding_mask"), given["src"]
    if padding is None or given.get("mask") is not None or src.dim() != 3 or torch.is_autocast_enabled():
        return output
    kept = F._canonical_mask(padding, "src_key_padding_mask", None, "", src.dtype).logical_not()
    aligned = (kept[:, 1:] <= kept[:, :-1]).all()  # else torch keeps the padding
    zeros = torch.zeros_like(output)
    zeros = zeros if encoder.norm is None else encoder.norm(zeros)
    return torch.where((aligned & ~kept).unsqueeze(-1), zeros, output)


def _nests(encoder: torch.nn.TransformerEncoder, graded: bool) -> bool:
    """Return True if torch would make nested tensors of left-aligned rows. Source: TransformerEncoder.forward."""
    layer: Any = encoder.layers[0]
    if not getattr(encoder, "use_nested_tensor", False) or layer.training:
        return False
    return not (graded and any(parameter.requires_grad for parameter in layer.parameters()))
