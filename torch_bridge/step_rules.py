"""What a compiled step asks of torch before a call, and its words for what torch has to run."""

import torch

from jaxtrain.errors import UserError
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
    """Return the given seed, or torch's own."""
    return torch.initial_seed() if seed is None else seed
