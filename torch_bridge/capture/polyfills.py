"""Parts of torch that look at values, as formulas that TorchDynamo captures."""

import contextlib
import functools
import math
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.distributions import kl
from torch.nn import functional as F
from torch.nn.modules.transformer import _detect_is_causal_mask


def is_causal(mask: Any, is_causal: Any = None, size: Any = None) -> bool:
    """Return `is_causal`; torch reads the mask's values, to choose a faster kernel if the mask is causal."""
    return is_causal is True


@functools.cache
def register() -> None:
    """Let Dynamo capture these functions in this process, and know torch's rules for divergences as after a first
    use."""
    torch.compiler.substitute_in_graph(_detect_is_causal_mask, skip_signature_check=True)(is_causal)
    for kinds in list(kl._KL_REGISTRY):
        kl._KL_MEMOIZE.setdefault(kinds, kl._dispatch_kl(*kinds))


class AdaptiveLoss(NamedTuple):
    output: torch.Tensor
    loss: torch.Tensor


def _adaptive_log_softmax(self: Any, input_: torch.Tensor, target_: torch.Tensor) -> AdaptiveLoss:
    """Compute the loss from all log-probabilities; torch selects each cluster's rows."""
    rows, targets = (input_, target_) if target_.dim() else (input_.unsqueeze(0), target_.unsqueeze(0))
    output = self.log_prob(rows).gather(1, targets.unsqueeze(1)).squeeze(1)
    return AdaptiveLoss(output if target_.dim() else output.squeeze(0), -output.mean())


def _gaussian_loss(self: Any, input: torch.Tensor, target: torch.Tensor, var: Any) -> torch.Tensor:
    """Compute the loss, NaN for a negative variance, for which torch raises."""
    var = var if isinstance(var, torch.Tensor) else torch.full_like(input, var)
    if var.dim() == input.dim() - 1 and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    elif var.dim() != input.dim() or var.shape[:-1] != input.shape[:-1] or var.shape[-1] not in (1, input.shape[-1]):
        raise ValueError("var is of incorrect size")
    clamped = var + (var.clamp(min=self.eps) - var).detach()  # its gradient goes through the clamp, as torch's
    clamped = torch.where(var < 0, torch.nan, clamped)
    loss = 0.5 * (clamped.log() + (input - target).square() / clamped)
    loss = loss + 0.5 * math.log(2 * math.pi) if self.full else loss
    return loss.mean() if self.reduction == "mean" else loss.sum() if self.reduction == "sum" else loss


def _averaged_batch_norm(self: Any, input: torch.Tensor) -> torch.Tensor:
    """Compute BatchNorm with momentum=None: torch reads the number of batches as a Python float."""
    if not self.training or not self.track_running_stats:
        return type(self).forward(self, input)
    self._check_input_dim(input)
    mean, var = torch.zeros_like(self.running_mean), torch.ones_like(self.running_var)
    y = F.batch_norm(input, mean, var, self.weight, self.bias, True, 1.0, self.eps)
    self.num_batches_tracked.add_(1)
    for running, new in ((self.running_mean, mean), (self.running_var, var)):
        running.copy_(running + (new - running) / self.num_batches_tracked)
    return y


_FORWARDS: dict[type, Callable] = {
    torch.nn.AdaptiveLogSoftmaxWithLoss: _adaptive_log_softmax,
    torch.nn.GaussianNLLLoss: _gaussian_loss,
    **dict.fromkeys((torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d), _averaged_batch_norm),
}


@contextlib.contextmanager
def plain_forwards(entry: torch.nn.Module) -> Iterator[None]:
    """Inside the context, let modules of torch's below this one compute by their formulas."""
    changed = [inner for inner in entry.modules() if type(inner) in _FORWARDS and "forward" not in vars(inner)]
    changed = [inner for inner in changed if getattr(inner, "momentum", None) is None]
    for inner in changed:
        vars(inner)["forward"] = types.MethodType(_FORWARDS[type(inner)], inner)
    try:
        yield
    finally:
        for inner in changed:
            del vars(inner)["forward"]
