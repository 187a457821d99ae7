"""Functions of torch that check a size known from the data only, rewritten without the check for a record."""

from typing import NamedTuple

import torch
from torch import library
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.nn import functional as F

library.define("torch_bridge::logsumexp", "(Tensor x, int[] dim, bool keepdim) -> Tensor")


@library.register_fake("torch_bridge::logsumexp")
def _shape(x, dim, keepdim):
    axes = {axis % x.dim() for axis in dim}
    if keepdim:
        return x.new_empty([1 if axis in axes else size for axis, size in enumerate(x.shape)])
    return x.new_empty([size for axis, size in enumerate(x.shape) if axis not in axes])


def _refuse_backward(ctx, *gradients):
    raise NotImplementedError("torch.autograd.grad of logsumexp over a selection inside a forward")


library.register_autograd("torch_bridge::logsumexp", _refuse_backward)


def logsumexp(input, *args, **kwargs):
    """Compute torch.logsumexp without torch's check of the number of elements, if two axes depend on data."""
    if sum(map(_unknown, input.shape)) < 2 or input.is_complex():
        return torch.logsumexp(input, *args, **kwargs)
    return _over_two(input, *args, **kwargs)


def _over_two(input, dim, keepdim=False):
    axes = [dim] if isinstance(dim, int) else list(dim)
    return torch.ops.torch_bridge.logsumexp(input, axes, keepdim)


def batch_norm(input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    """Compute torch.nn.functional.batch_norm without torch's check of the number of rows, if that depends on data."""
    if not training or not _unknown(input.shape[0]):
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    axes, shape = [0, *range(2, input.dim())], [1, -1, *[1] * (input.dim() - 2)]
    mean, var = input.mean(axes), input.var(axes, correction=0)
    for running, new in ((running_mean, mean), (running_var, input.var(axes, correction=1))):
        if running is not None:
            running.copy_((1 - momentum) * running + momentum * new.detach())
    y = (input - mean.view(shape)) * torch.rsqrt(var.view(shape) + eps)
    y = y if weight is None else y * weight.view(shape)
    return y if bias is None else y + bias.view(shape)


def _unknown(size) -> bool:
    return isinstance(size, torch.SymInt) and bool(free_unbacked_symbols(size))


class LeastSquares(NamedTuple):
    solution: torch.Tensor
    residuals: torch.Tensor
    rank: torch.Tensor
    singular_values: torch.Tensor


def lstsq(input, b, rcond=None, *, driver=None):
    """Compute torch.linalg.lstsq. If the rank is not full, residuals are NaN: torch returns none, depending on
    values."""
    rcond = max(input.shape[-2:]) * torch.finfo(input.dtype).eps if rcond is None else rcond
    vector = b.dim() == 1 or (b.dim() == input.dim() - 1 and b.shape == input.shape[:-1])
    columns = b.unsqueeze(-1) if vector else b
    solution = torch.linalg.pinv(input, rtol=rcond) @ columns
    rank = torch.linalg.matrix_rank(input, rtol=rcond)
    residuals = singular_values = input.new_empty(0)
    if driver not in (None, "gelsy") and input.shape[-2] > input.shape[-1]:
        residuals = (input @ solution - columns).abs().square().sum(-2)
        residuals = torch.where((rank == input.shape[-1]).all(), residuals, torch.nan)
    if driver in ("gelsd", "gelss"):
        singular_values = torch.linalg.svdvals(input)
    rank = rank.new_empty(0) if driver == "gels" else rank
    return LeastSquares(solution.squeeze(-1) if vector else solution, residuals, rank, singular_values)


class AdaptiveLoss(NamedTuple):
    output: torch.Tensor
    loss: torch.Tensor


def adaptive_log_softmax(self, input, target):
    """Compute AdaptiveLogSoftmaxWithLoss's forward from all log-probabilities; torch selects each cluster's rows."""
    rows, targets = (input, target) if target.dim() else (input.unsqueeze(0), target.unsqueeze(0))
    output = self.log_prob(rows).gather(1, targets.unsqueeze(1)).squeeze(1)
    return AdaptiveLoss(output if target.dim() else output.squeeze(0), -output.mean())


def combinations(input, r=2, with_replacement=False):
    """Compute torch.combinations, whose pairs torch selects with a mask."""
    if r != 2:
        return torch.combinations(input, r, with_replacement)
    size, offset = input.shape[0], 0 if with_replacement else 1
    places = torch.triu_indices(size, size, offset, device=input.device)
    first, second = places[0], places[1]
    return torch.stack([input[first], input[second]], 1)
