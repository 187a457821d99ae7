"""Questions of a compiled step to torch before a call, and its words for what torch has to run."""

from typing import Any

import numpy as np
import torch

from jaxtrain.errors import UserError
from torch_bridge.batch_tensors import tensors_in
from torch_bridge.capture.reasons import stopped_by  # noqa: F401
from torch_bridge.lowering import UnsupportedModel, errors  # noqa: F401
from torch_bridge.lowering.errors import CannotRecord, MayRaise, NotCaptured, stays_in_torch  # noqa: F401
from torch_bridge.modes import watching
from torch_bridge.optimizers import check_scheduler  # noqa: F401
from torch_bridge.refusals import Refusals  # noqa: F401


def reason_of(error: UserError) -> str:
    """Return the first reason why something is refused, with its line in the code, as one line of text."""
    refused = error.__cause__
    if not isinstance(refused, UnsupportedModel) or not refused.obstacles:
        return str(error).partition("\n")[0]
    first = refused.obstacles[0]
    return first.what.partition("\n")[0].partition(". ")[0] + (f" at {first.where}" if first.where else "")


def check_gradients_on(loss: str) -> None:
    """Raise UserError if gradients are off, so that torch's backward() would find no graph."""
    if not torch.is_grad_enabled():
        raise UserError(
            f"{loss}: a step was called under torch.no_grad(), set_grad_enabled(False) or inference_mode(), where "
            "torch's backward() raises. Call it outside to train; step.eval() gives the forward pass of a validation"
        )


def watched_in_torch() -> str:
    """Return why a step has to run in torch now: something looks into torch's own passes; "" if nothing does."""
    if torch.is_anomaly_enabled():
        return "torch's anomaly mode looks into torch's own backward pass"
    return (modes := watching()) and f"{modes} around the step sees each of torch's own operations"


def seed_of(seed: int | None) -> int:
    """Return the given seed, or torch's own. Raises UserError for one that torch.manual_seed refuses: its bits would
    not all count."""
    if seed is None:
        return torch.initial_seed()
    if not isinstance(seed, int | np.integer) or not -(2**63) <= seed < 2**64:
        raise UserError(f"seed: wanted an integer from -2**63 to 2**64 - 1, as torch.manual_seed takes, got {seed!r}")
    return int(seed)


class Differentiated:
    """Tensors of a batch that a call has begun to differentiate by (`x.requires_grad_()`)."""

    def __init__(self, batch: Any):
        """Note the batch before the call."""
        self._batch, self._before = batch, [tensor.requires_grad for tensor in tensors_in(batch)]

    def numbers(self) -> frozenset[int]:
        """Return, after the call, their numbers among the batch's tensors."""
        now = [tensor.requires_grad and tensor.is_leaf for tensor in tensors_in(self._batch)]
        if len(now) != len(self._before):
            return frozenset()
        pairs = enumerate(zip(self._before, now, strict=True))
        return frozenset(number for number, (before, after) in pairs if after and not before)


def begin_gradients(batch: Any, numbers: frozenset[int]) -> None:
    """Ask for gradients of these tensors of a batch, as the loss is about to do: TorchDynamo has no form for that."""
    for number, tensor in enumerate(tensors_in(batch)):
        if number in numbers and tensor.is_leaf and tensor.is_floating_point():
            tensor.requires_grad_()


def shapes_of(batch: Any) -> tuple:
    """Return the shapes of a batch's tensors and arrays, with their dtypes."""
    return tuple((_shape(leaf), leaf.dtype) for leaf in tensors_in(batch, (torch.Tensor, np.ndarray)))


def _shape(value: Any) -> tuple:
    try:
        return tuple(value.shape)
    except Exception:  # a nested tensor has none, and a tensor class of the user's may raise anything
        return ()
