"""Losses replaced while a module is recorded. torch's own CTC loss reads the lengths' values to size its work memory;
its multi_margin_loss is decomposed into a clamp, whose derivative differs where the margin is met."""

import torch
from torch import library
from torch.utils._pytree import tree_map

library.define(
    "torch_bridge::ctc_loss",
    "(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, int reduction, "
    "bool zero_infinity) -> Tensor",
)

library.define(
    "torch_bridge::multi_margin_loss",
    "(Tensor x, Tensor target, Scalar p=1, Scalar margin=1, Tensor? weight=None, int reduction=1) -> Tensor",
)


@library.register_fake("torch_bridge::multi_margin_loss")
def _multi_margin_shape(x, target, p=1, margin=1, weight=None, reduction=1):
    return x.new_empty(x.shape[:-1] if reduction == 0 else ())


_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


@library.register_fake("torch_bridge::ctc_loss")
def _shape(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity):
    return log_probs.new_empty((log_probs.shape[1],) if reduction == 0 else ())


def _refuse_backward(ctx, *gradients):
    raise NotImplementedError("torch.autograd.grad of the CTC loss inside a forward: JAX takes the gradient outside")


library.register_autograd("torch_bridge::ctc_loss", _refuse_backward)


class Selected:
    """Labels that a mask selects, in one row of unknown length, as speech models pass them to the CTC loss.

    Any other use converts it to torch's own selection, whose size depends on values.
    """

    __slots__ = ("mask", "values")

    def __init__(self, values: torch.Tensor, mask: torch.Tensor):
        self.values, self.mask = values, mask

    def real(self) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            return torch.masked_select(self.values, self.mask)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        exchange = lambda item: item.real() if isinstance(item, Selected) else item
        args, kwargs = tree_map(exchange, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.real(), name)

    def rows(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return the labels as [batch, label], consecutive pieces of the row, of which `lengths` count."""
        count = self.mask.shape[1]
        order = torch.argsort((~self.mask).flatten().to(torch.int32), stable=True)
        start = torch.cumsum(lengths, 0) - lengths
        places = (start[:, None] + torch.arange(count)).clamp(0, order.shape[0] - 1)
        return self.values.flatten()[order][places]


def _define(name: str) -> None:
    setattr(Selected, name, lambda self, *args: getattr(self.real(), name)(*args))


for _name in "add radd sub rsub mul rmul truediv eq ne lt le gt ge getitem len iter neg bool int float".split():
    _define(f"__{_name}__")


def masked_select(values: torch.Tensor, mask: torch.Tensor) -> "torch.Tensor | Selected":
    """Compute torch.masked_select; return integer labels [batch, label] as Selected until their use is known."""
    if values.dim() == 2 and values.shape == mask.shape and not values.is_floating_point():
        return Selected(values, mask)
    return values[mask] if values.shape == mask.shape else torch.masked_select(values, mask)


def ctc_loss(
    log_probs, targets, input_lengths, target_lengths, blank=0, reduction="mean", zero_infinity=False
) -> torch.Tensor:
    """Compute torch.nn.functional.ctc_loss with lengths whose values only the compiled step knows.

    log_probs: [time, batch, class] or [time, class]. Raises ValueError for an unknown reduction, as torch.
    """
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{reduction} is not a valid value for reduction")
    single = log_probs.dim() == 2
    if single:
        log_probs, targets = log_probs[:, None], targets[None]
    most = targets.mask.shape[1] if isinstance(targets, Selected) else targets.shape[-1]
    given = [torch.as_tensor(length).reshape(-1) for length in (input_lengths, target_lengths)]
    lengths = [length.clamp(0, limit) for length, limit in zip(given, (log_probs.shape[0], most), strict=True)]
    if isinstance(targets, Selected):
        targets = targets.rows(lengths[1])
    value = torch.ops.torch_bridge.ctc_loss(
        log_probs, targets, *lengths, blank, _REDUCTIONS[reduction], bool(zero_infinity)
    )
    beyond = [(was != now).any() for was, now in zip(given, lengths, strict=True)]
    value = torch.where(beyond[0] | beyond[1], torch.nan, value)  # where torch raises an error
    return value[0] if single and reduction == "none" else value
