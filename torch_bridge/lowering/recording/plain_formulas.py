"""Formulas that can be recorded, for functions of torch that look at values or address memory."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F


def gaussian_nll_loss(input, target, var, full=False, eps=1e-6, reduction="mean"):
    """Compute the loss without torch's check of the variances. Source: torch.nn.functional.gaussian_nll_loss."""
    if not isinstance(var, torch.Tensor):
        var = torch.full((), float(var), dtype=input.dtype) * torch.ones_like(input)
    if var.shape != input.shape and input.shape[:-1] == var.shape:
        var = var.unsqueeze(-1)
    with torch.no_grad():
        floor = var.clamp(min=eps)
    var = var + (floor - var).detach()  # torch clamps without a gradient
    value = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        value = value + 0.9189385332046727  # half the logarithm of 2 pi
    return value if reduction == "none" else value.mean() if reduction == "mean" else value.sum()


def cov(input, *, correction=1, fweights=None, aweights=None):
    """Return covariances of variables [variable, observation], without torch's check of the weights' values. Source:
    torch.cov."""
    x = input.reshape(1, -1) if input.dim() < 2 else input
    weights = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    count = x.shape[1] if weights is None else weights.sum()
    mean = (x if weights is None else x * weights).sum(1, keepdim=True) / count
    if aweights is not None and correction:
        free = count - correction * (weights * aweights).sum() / count
    else:
        free = count - correction
    x = x - mean
    products = x @ (x if weights is None else x * weights).t().conj()
    free = torch.clamp(free, min=0) if isinstance(free, torch.Tensor) else max(free, 0)
    return (products / free).squeeze()


def corrcoef(input):
    """Return correlation coefficients of variables. Source: torch.corrcoef."""
    c = cov(input)
    if not c.dim():
        return c / c
    deviation = c.diagonal().real.sqrt() if c.is_complex() else c.diagonal().sqrt()
    c = c / deviation[:, None] / deviation
    return torch.complex(c.real.clamp(-1, 1), c.imag.clamp(-1, 1)) if c.is_complex() else c.clamp(-1, 1)


_fill_diagonal = torch.Tensor.fill_diagonal_


def fill_diagonal(x, fill_value, wrap=False):
    """Write the diagonal through a view, where torch addresses memory. Source: torch.Tensor.fill_diagonal_."""
    if x.dim() != 2 or wrap:
        return _fill_diagonal(x, fill_value, wrap)
    x.diagonal().fill_(fill_value)
    return x


def with_long_classes(function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> tuple[tuple, Mapping[str, Any]]:
    """Return the arguments of a loss of classes with uint8 classes as int64: torch's kernels for [row, class] take
    both, but those for tensors without values, with which modules are recorded, only take int64. Torch refuses uint8
    for maps of classes [row, class, ...]."""
    if function not in (F.cross_entropy, F.nll_loss) or (args[0] if args else kwargs["input"]).dim() > 2:
        return args, kwargs
    long = lambda value: value.long() if isinstance(value, torch.Tensor) and value.dtype == torch.uint8 else value
    return (*args[:1], *map(long, args[1:2]), *args[2:]), {name: long(value) for name, value in kwargs.items()}


REPLACED: dict[Callable, Callable] = {
    torch.Tensor.fill_diagonal_: fill_diagonal,
    torch.cov: cov,
    torch.Tensor.cov: cov,
    torch.corrcoef: corrcoef,
    torch.Tensor.corrcoef: corrcoef,
}
