"""The CTC loss while a module is recorded: torch's own looks at the lengths' values to size its work memory."""

import torch
from torch import library

library.define(
    "torch_bridge::ctc_loss",
    "(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, int reduction, "
    "bool zero_infinity) -> Tensor",
)

_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


@library.register_fake("torch_bridge::ctc_loss")
def _shape(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity):
    return log_probs.new_empty((log_probs.shape[1],) if reduction == 0 else ())


def _refuse_backward(ctx, *gradients):
    raise NotImplementedError("torch.autograd.grad of the CTC loss inside a forward: JAX takes the gradient outside")


library.register_autograd("torch_bridge::ctc_loss", _refuse_backward)


def ctc_loss(
    log_probs, targets, input_lengths, target_lengths, blank=0, reduction="mean", zero_infinity=False
) -> torch.Tensor:
    """Compute torch.nn.functional.ctc_loss with lengths whose values are known to the compiled step only.

    log_probs: [time, batch, class] or [time, class]. Raises ValueError for an unknown reduction, as torch.
    """
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{reduction} is not a valid value for reduction")
    single = log_probs.dim() == 2
    if single:
        log_probs, targets = log_probs[:, None], targets[None]
    lengths = [torch.as_tensor(length).reshape(-1) for length in (input_lengths, target_lengths)]
    value = torch.ops.torch_bridge.ctc_loss(
        log_probs, targets, *lengths, blank, _REDUCTIONS[reduction], bool(zero_infinity)
    )
    return value[0] if single and reduction == "none" else value
