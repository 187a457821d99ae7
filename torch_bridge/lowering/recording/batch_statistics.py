"""Running statistics of BatchNorm, updated as a record needs."""

import inspect
import pathlib
import sys
from collections.abc import Callable

import torch
import torch.utils.checkpoint
from torch.nn import functional as F

from torch_bridge.lowering.errors import StaysInTorch
from torch_bridge.lowering.recording import gradients

# torch's kernel keeps no copy of the statistics that it normalised with: its backward pass reads their later values.
_BOTH_MODES = (
    "a BatchNorm runs in eval() and then in train() before one backward pass, whose gradients torch computes with the "
    "statistics that the second call has written"
)
_EXPORT = str(pathlib.Path(__file__).with_name("export.py"))
_batch_norm_forward = torch.nn.modules.batchnorm._BatchNorm.forward


def recorded_forward() -> Callable:
    """Return the forward of the BatchNorms of one record.

    momentum=None averages over all batches so far, whose number torch reads as a Python float. Inside a checkpoint
    torch computes a batch again in its backward pass, and counts it twice.
    """
    evaluated: set[torch.nn.Module] = set()  # run in eval mode, with gradients to come

    def forward(self, x):
        counts = self.training and self.track_running_stats
        if counts and self in evaluated:
            raise StaysInTorch(_BOTH_MODES)
        graded = torch.is_grad_enabled() and (x.requires_grad or (self.affine and self.weight.requires_grad))
        if graded and not counts and self.running_mean is not None:
            evaluated.add(self)
        if counts and _checkpointed(sys._getframe(1)):
            _averaged_batch_norm(self, x)
        return _averaged_batch_norm(self, x)

    return forward


def _checkpointed(frame) -> bool:
    """Return True if torch.utils.checkpoint runs this code, which will run it once more."""
    if gradients.RECOMPUTED.get():
        return True
    code = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__
    while frame is not None and frame.f_code is not code:
        if frame.f_code.co_filename == _EXPORT:  # a checkpoint around the recording does not count
            return False
        frame = frame.f_back
    return frame is not None and torch.is_grad_enabled()


def _averaged_batch_norm(self, x):
    if self.momentum is not None or not self.training or not self.track_running_stats:
        return _batch_norm_forward(self, x)
    self._check_input_dim(x)
    mean, var = torch.zeros_like(self.running_mean), torch.ones_like(self.running_var)
    y = F.batch_norm(x, mean, var, self.weight, self.bias, True, 1.0, self.eps)
    self.num_batches_tracked.add_(1)
    for running, new in ((self.running_mean, mean), (self.running_var, var)):
        running.copy_(running + (new - running) / self.num_batches_tracked)
    return y
