"""A torch loss over a batch that may hold padding, recorded together with the module it belongs to.

Training batches have one size; the rows past the end of the data are marked in `valid`. torch's losses know nothing of
it, so while a loss is recorded, its reductions over the batch are made to count the real rows only: the figure is
torch's on the batch without its padding.
"""

import inspect
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from jaxtrain.errors import UserError
from torch_bridge.training.batch_plan import BatchView, Plan

CLASS_LOSSES = (F.cross_entropy, F.nll_loss)
LOSSES = (
    *CLASS_LOSSES,
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.kl_div,
    F.poisson_nll_loss,
    F.gaussian_nll_loss,
    F.soft_margin_loss,
    F.multi_margin_loss,
    F.multilabel_margin_loss,
    F.multilabel_soft_margin_loss,
    F.cosine_embedding_loss,
    F.hinge_embedding_loss,
    F.margin_ranking_loss,
    F.triplet_margin_loss,
    F.ctc_loss,
)
REDUCTIONS = (torch.Tensor.mean, torch.mean, torch.Tensor.sum, torch.sum)


class RealRows(TorchFunctionMode):
    """While active, losses of torch.nn.functional (and, with `reductions`, means and sums over the batch axis) leave
    out the rows that are not valid. A tensor belongs to the batch where its first axis is the batch, or the batch times
    something, samples outermost. `counts` collects how many elements each mean was taken over."""

    def __init__(self, valid: torch.Tensor, reductions: bool):
        super().__init__()
        self.valid = valid
        self.reductions = reductions
        self.counts: list[torch.Tensor] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if function in LOSSES:
                return self._loss(function, args, kwargs)
            if self.reductions and function in REDUCTIONS and isinstance(args[0], torch.Tensor):
                return self._reduce(function, args, kwargs)
            return function(*args, **kwargs)

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """bool [tensor.shape[0]]: which rows are real; None where the tensor is not of the batch."""
        if tensor.dim() == 0:
            return None
        times = _multiple(tensor.shape[0], self.valid.shape[0])
        if times is None:
            return None
        if isinstance(times, int) and times == 1:
            return self.valid
        wide = self.valid[:, None].expand(self.valid.shape[0], times)
        return wide.reshape(tensor.shape[0])

    def _loss(self, function, args, kwargs):
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        reduction = given["reduction"]
        if reduction == "none":
            return function(**given)
        target = given.get("target")
        if function in CLASS_LOSSES and not target.is_floating_point():
            rows = self._rows(target)
            if rows is not None:
                return self._class_loss(function, given, rows, reduction)
        values = function(**{**given, "reduction": "none"})
        rows = self._rows(values)
        if rows is None:
            return function(**given)
        if function is F.ctc_loss and reduction == "mean":
            values = values / given["target_lengths"].clamp(min=1)
        if function is F.kl_div and reduction == "batchmean":
            count = rows.sum()
            total = self._total(values, rows)
            self.counts.append(count)
            return total / count.clamp(min=1)
        return self._mean(values, rows) if reduction == "mean" else self._total(values, rows)

    def _class_loss(self, function, given, rows, reduction):
        """Padding is ignored as torch ignores `ignore_index`, class weights and label smoothing included."""
        target, ignored = given["target"], given["ignore_index"]
        mask = rows.reshape(-1, *(1,) * (target.dim() - 1))
        target = torch.where(mask, target, ignored)
        total = function(**{**given, "target": target, "reduction": "sum"})
        if reduction == "sum":
            return total
        counted = target != ignored
        if given["weight"] is None:
            count = counted.sum()
        else:
            count = torch.where(counted, given["weight"][torch.where(counted, target, 0)], 0).sum()
        self.counts.append(count)
        return total / torch.where(count > 0, count, 1)

    @staticmethod
    def _total(values, rows):
        return torch.where(rows.reshape(-1, *(1,) * (values.dim() - 1)), values, 0).sum()

    def _mean(self, values, rows):
        per_row = values.numel() // values.shape[0]
        count = rows.sum()
        self.counts.append(count * per_row)
        return self._total(values, rows) / (count * per_row).clamp(min=1)

    def _reduce(self, function, args, kwargs):
        """x.mean(), x.sum(), also over axes that include the first."""
        tensor = args[0]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        axes = range(tensor.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
        axes = {axis % max(tensor.dim(), 1) for axis in axes}
        rows = self._rows(tensor) if 0 in axes and tensor.dim() else None
        if rows is None:
            return function(*args, **kwargs)
        mask = rows.reshape(-1, *(1,) * (tensor.dim() - 1))
        keepdim = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
        total = torch.where(mask, tensor, 0).sum(dim=sorted(axes), keepdim=keepdim)
        if function in (torch.Tensor.sum, torch.sum):
            return total
        count = rows.sum()
        for axis in axes - {0}:
            count = count * tensor.shape[axis]
        if dim is None:
            self.counts.append(count)
        return total / count.clamp(min=1)


def _multiple(size: Any, batch: Any) -> Any:
    """size / batch where that is a whole number for every batch size; None elsewhere."""
    if not isinstance(batch, torch.SymInt):
        fits = not isinstance(size, torch.SymInt) and batch and size % batch == 0
        return size // batch if fits else None
    if not isinstance(size, torch.SymInt):
        return None
    symbol = batch.node.expr
    ratio = sympy.cancel(size.node.expr / symbol) if symbol.is_Symbol else None
    if ratio is None or symbol in ratio.free_symbols or sympy.denom(ratio) != 1:
        return None
    return 1 if ratio == 1 else size // batch


class LossEntry(torch.nn.Module):
    """(batch, valid) -> (loss, weight): the module's call and its loss as one graph.

    loss: a loss module (output, target) -> scalar; a function (output, batch) -> scalar or one value per sample; or
    None for the model's own, an output named `loss` or a scalar.
    """

    def __init__(self, module: torch.nn.Module, loss: Callable | None, plan: Plan):
        super().__init__()
        self.wrapped_module = module
        self.criterion = loss
        self.plan = plan

    def forward(self, batch: dict, valid: torch.Tensor):
        for leaf in pytree.tree_leaves(batch):
            torch._check(leaf.shape[0] == valid.shape[0])
        own = self.criterion is None
        if own:
            with RealRows(valid, reductions=False) as rows:
                value = own_loss(self.plan.call(self.wrapped_module, batch))
        else:
            output = self.plan.call(self.wrapped_module, batch, with_target=False)
            with RealRows(valid, reductions=True) as rows:
                value = self._criterion(output, batch)
                if value.dim():
                    value = value.reshape(value.shape[0], -1).mean()
        weight = rows.counts[0] if len(rows.counts) == 1 else valid.sum()
        weight = weight.to(torch.float32)
        return torch.where(weight > 0, value, 0), weight

    def _criterion(self, output, batch):
        if takes_target(self.criterion):
            return self.criterion(main_output(output), batch[self.plan.target])
        return self.criterion(output, BatchView(batch))


def takes_target(loss: Any) -> bool:
    """Whether a loss is called as (output, target): loss modules and torch.nn.functional's own."""
    return isinstance(loss, torch.nn.Module) or getattr(loss, "__module__", None) == F.__name__


def check_loss(loss: Any) -> None:
    """Raises UserError for what cannot be called as (output, target) or (output, batch)."""
    if loss is None or takes_target(loss):
        return
    try:
        inspect.signature(loss).bind("output", "batch")
    except (TypeError, ValueError) as error:
        raise UserError(
            f"the loss of a torch module is a torch loss module, a torch function of (output, batch), or None for the "
            f"module's own; {getattr(loss, '__name__', loss)!r} is neither: {error}"
        ) from None


def own_loss(output: Any) -> torch.Tensor:
    """The loss among a model's outputs. Raises UserError where there is none."""
    found = output
    if isinstance(output, dict):
        found = output.get("loss")
    elif hasattr(output, "loss"):
        found = output.loss
    elif isinstance(output, (tuple, list)):
        found = output[0]
    if not isinstance(found, torch.Tensor) or found.dim():
        raise UserError(
            "the model returns no loss of its own (an output named `loss`, or a scalar); give one: "
            "Trainer(..., loss=torch.nn.CrossEntropyLoss()), or loss.target in the YAML"
        )
    return found


def main_output(output: Any) -> torch.Tensor:
    """The tensor that a loss module compares: the output itself, `logits`, `last_hidden_state`, or the first one."""
    if isinstance(output, dict):
        for name in ("logits", "prediction", "last_hidden_state"):
            if name in output:
                return output[name]
        return next(iter(output.values()))
    return output[0] if isinstance(output, (tuple, list)) else output
