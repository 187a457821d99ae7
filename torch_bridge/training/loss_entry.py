"""Combine a torch module's call and its loss in one torch module, to capture them as one graph."""

import dataclasses
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from jaxtrain.errors import UserError
from torch_bridge.call_forms import arguments_of, names_target, needed_arguments
from torch_bridge.lowering.errors import NoLoss
from torch_bridge.training.batch_plan import BatchView, Plan

_NUMBERS = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}  # what stands for numbers in a record


class LossEntry(torch.nn.Module):
    """batch -> {"value": scalar, "parts": scalars to log} and, if the loss returns one, its "weight".

    loss: a loss module (output, target) -> its loss; a function (output, batch) or (output, target) -> its loss, called
    as in `plan.compares`; or None for the model's own: an output named `loss` or a scalar. A loss is a scalar, or one
    value per sample, which are averaged; or a tuple that also holds its weight, or a dict of further values to log.
    """

    def __init__(self, module: torch.nn.Module, loss: Callable | None, plan: Plan):
        super().__init__()
        self.wrapped_module = module
        self.criterion = loss
        self.plan = plan

    def forward(self, batch: dict) -> dict[str, Any]:
        sizes = [leaf.shape[0] for leaf in pytree.tree_leaves(batch) if leaf.dim()] or [0]
        for rows in sizes[1:]:
            if rows == sizes[0]:  # other tensors of a collate function may have any number of rows
                torch._check(rows == sizes[0])
        if self.criterion is None:
            return _parts_of(own_loss(self.plan.call(self.wrapped_module, batch)), sizes)
        output = self.plan.call(self.wrapped_module, batch, with_target=False)
        if output is None:
            raise NoLoss(f"{type(self.wrapped_module).__name__} returns None: its forward wants a return statement")
        return _parts_of(self._criterion(output, batch), sizes)

    def _criterion(self, output, batch):
        loss = cast(Callable, self.criterion)
        if self.plan.compares is None:
            return loss(output, BatchView(batch))
        compared = main_output(output) if takes_target(loss) else output
        if takes_class_ids(loss) and compared.dim() <= 2:  # as torch's kernel for values, not the one for sizes alone
            batch = {key: value.long() if _is_byte(value) else value for key, value in batch.items()}
        return self.plan.compares.call(loss, compared, batch)


def in_criterion(error: BaseException) -> bool:
    """Return True if the loss has raised this error, and not the module."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code is LossEntry._criterion.__code__ for frame, _ in frames)


def _parts_of(found: Any, sizes: Sequence[Any]) -> dict[str, Any]:
    """Split what a loss returned into value, parts and weight. sizes: numbers of rows of the batch's tensors. Raises
    NoLoss for anything that is not a loss."""
    value, *rest = found if isinstance(found, tuple) and found else (found,)
    logged = [item for item in rest if isinstance(item, Mapping)]
    weights = [item for item in rest if not isinstance(item, Mapping)]
    wanted = "wanted a tensor, (tensor, weight) or (tensor, dict of values to log)"
    if not isinstance(value, torch.Tensor) or len(logged) > 1 or len(weights) > 1:
        kind = _NUMBERS.get(type(found), type(found)).__name__
        taken_out = ": item() and float() take the number out of what is differentiated" if kind == "float" else ""
        raise NoLoss(f"the loss returned {kind}, {wanted}{taken_out}")
    for weight in weights:
        if not isinstance(weight, int | float | torch.Tensor | torch.SymInt | torch.SymFloat) or _axes(weight):
            got = f"a tensor of {_axes(weight)} axes" if isinstance(weight, torch.Tensor) else type(weight).__name__
            raise NoLoss(
                f"the loss returned a tuple of a tensor and {got}, {wanted}; a weight is one number, a count of tokens"
            )
    if value.numel() != 1 and not any(value.shape[0] == rows for rows in sizes):
        raise NoLoss(
            f"the loss returned a tensor of shape {tuple(value.shape)}, wanted a scalar, or one value per sample; "
            "torch computes gradients of scalars alone. Return its .mean() or .sum()"
        )
    scalar = lambda x: x.mean() if isinstance(x, torch.Tensor) and x.dim() else x * torch.ones(())
    parts = {str(name): scalar(item) for name, item in (logged[0] if logged else {}).items()}
    weight = {"weight": weights[0] * torch.ones(())} if weights else {}
    return {"value": value.mean() if value.dim() else value, "parts": parts, **weight}


def _axes(value: Any) -> int:
    return value.dim() if isinstance(value, torch.Tensor) else 0


def takes_target(loss: Any) -> bool:
    """Return True if a loss is called as (output, target): loss modules and functions of torch.nn.functional."""
    return isinstance(loss, torch.nn.Module) or getattr(loss, "__module__", None) == F.__name__


def takes_class_ids(loss: Any) -> bool:
    """Return True for torch's losses of classes, which take uint8 ids for outputs [row, class]."""
    return isinstance(loss, torch.nn.CrossEntropyLoss | torch.nn.NLLLoss) or loss in (F.cross_entropy, F.nll_loss)


def _is_byte(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.uint8


def with_loss(plan: Plan, loss: Callable | None, keys: Sequence[str]) -> list[Plan]:
    """Return the plan with each way to call the loss, the likeliest first. A function without a target's name is called
    with (output, batch), or with (output, target) if torch cannot compute the former.

    keys: the batch's entries. Raises UserError if the loss's arguments cannot be determined.
    """
    if loss is None:
        return [plan]
    needed = needed_arguments(loss)
    compares = takes_target(loss)
    arguments = arguments_of(loss, keys, plan.target, plan.free(keys), compares or len(needed) < 3)
    plans = [] if arguments is None else [dataclasses.replace(plan, compares=arguments)]
    if not compares and _binds(loss):
        plans = [*plans, plan] if names_target(loss) else [plan, *plans]
    if plans:
        return plans
    name = getattr(loss, "__name__", type(loss).__name__)
    has = f"the batch has {', '.join(keys)}"
    if not callable(loss) or not compares and len(needed) < 2:
        raise UserError(
            "the loss of a torch module is a torch loss module, a torch function of (output, batch) or of (output, "
            f"target), or None for the module's own; {name!r} is neither"
        )
    if len(needed) < 3:
        raise UserError(
            f"the loss compares an output with a target; which entry of the batch is it? It has {', '.join(keys)}. Set "
            "loss.target_key, or take the batch: loss=lambda output, batch: ..."
        )
    raise UserError(
        f"the loss {name} takes {', '.join(needed)}, and {has}: which is which? Name the arguments after entries, or "
        f"take the batch: loss=lambda output, batch: {name}(output, batch[...], ...)"
    )


def _binds(loss: Callable) -> bool:
    """Return True if a call (output, batch) is possible, or the function has no signature."""
    try:
        inspect.signature(loss).bind("output", "batch")
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def own_loss(output: Any) -> torch.Tensor:
    """Return the loss among a model's outputs. Raises NoLoss if there is none."""
    found = output
    if isinstance(output, dict):
        found = output.get("loss")
    elif hasattr(output, "loss"):
        found = output.loss
    elif isinstance(output, (tuple, list)) and output:
        scalars = [item for item in output if isinstance(item, torch.Tensor) and item.dim() == 0]
        found = scalars[0] if len(scalars) == 1 else output[0]
    if not isinstance(found, torch.Tensor) or found.dim():
        raise NoLoss(
            "the model returns no loss of its own (an output named `loss`, a scalar, or a tuple whose first or only "
            "scalar it is); give one: "
            "Trainer(..., loss=torch.nn.CrossEntropyLoss()), or loss.target in the YAML"
        )
    return found


def main_output(output: Any) -> torch.Tensor:
    """Return the tensor that a loss module compares: the output itself, `logits`, `last_hidden_state`, or the first
    one."""
    if isinstance(output, dict):
        for name in ("logits", "prediction", "last_hidden_state"):
            if name in output:
                return output[name]
        return next(iter(output.values()))
    return output[0] if isinstance(output, (tuple, list)) else output
