"""Loss of a batch: model and loss function run in torch, or compiled by JAX inside torch's autograd."""

import collections
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from jaxtrain.systems.hjepa.original.hjepa_model import HJEPA
from torch_bridge.capture.module_call import compile_calls

TORCH_FIRST = 32  # batches of each shape


class BatchLoss:
    """Callable (images, mask) -> loss, terms by name, and features: (context, target) or ().

    The first batches of each shape run in torch: torch itself raises any error in a model or loss, and a rare shape, as
    ragged masks have it, is not worth a compilation, which takes as long as tens of torch's steps. After them
    torch.compile's backend computes forward and backward. A loss without gradients stays in torch, and `say` gets the
    reason once.

    torch_first: number of batches of each shape that torch computes; 0 compiles from the first on. A count, not a time,
    so that each run has the same bits.
    """

    def __init__(self, model: Any, loss_fn: Any, autocast: Callable, say: Callable[[str], None]):
        self.model, self.loss_fn, self.autocast, self.say = model, loss_fn, autocast, say
        self.compiled = self._compiled()
        self.torch_first = TORCH_FIRST
        self.seen: collections.Counter[tuple] = collections.Counter()  # batches of each shape so far

    def belongs_to(self, model: Any, loss_fn: Any) -> bool:
        return self.model is model and self.loss_fn is loss_fn

    def __call__(self, images: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        batch = {"images": images, "mask": mask}
        if _is_plain(self.model):  # outside the program: their shape depends on the mask's values
            batch["indices"], batch["valid"] = self.model.masked_patches(mask)
        shape = (torch.is_grad_enabled(), *(tuple(tensor.shape) for tensor in batch.values()))
        self.seen[shape] += 1
        if self.seen[shape] <= self.torch_first or self.compiled is None:
            return self._in_torch(batch)
        with self.autocast():
            result = self.compiled(batch)
        if torch.is_grad_enabled() and not result["loss"].requires_grad:
            self.say("model and loss run in torch, uncompiled: the loss has no gradient to the model's parameters")
            self.compiled = None
            return self._in_torch(batch)
        return result

    def _in_torch(self, batch: dict[str, Any]) -> dict[str, Any]:
        with self.autocast():
            return forward_terms(self.model, self.loss_fn, batch)

    def _compiled(self) -> Callable | None:
        """Return the compiled function of a batch, or None if model and loss are not both torch code."""
        if not issubclass(type(self.model), nn.Module):  # type(): isinstance() would ask the object itself
            return None
        if not issubclass(type(self.loss_fn), (nn.Module, types.FunctionType, types.MethodType)):
            return None
        terms = _Terms(self.model, self.loss_fn)
        compile_calls([terms], wait=True)  # the Trainer gives the same bits in each run
        return terms


class _Terms(nn.Module):
    """Model and loss as one module."""

    def __init__(self, model: nn.Module, loss_fn: Callable):
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        return forward_terms(self.model, self.loss_fn, batch)


def _is_plain(model: Any) -> bool:
    """Return True if a call of the model runs HJEPA's forward and nothing else."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return type(model) is HJEPA and "forward" not in vars(model) and not any(getattr(model, hook) for hook in hooks)


def forward_terms(model, loss_fn, batch) -> dict[str, Any]:
    """Return loss, terms, and features: (context, target) or ()."""
    if "indices" in batch:
        outputs = model.forward_indices(batch["images"], batch["mask"], batch["indices"], batch["valid"])
    else:
        outputs = model(batch["images"], batch["mask"])
    arguments = {name: outputs.get(name) for name in ("predictions", "targets", "context_features", "target_features")}
    returned = _call_loss(loss_fn, arguments)
    if isinstance(returned, Mapping):
        loss, terms = returned["loss"], dict(returned)
    elif isinstance(returned, (tuple, list)):
        loss, terms = returned[0], dict(returned[1])
    else:
        loss, terms = returned, {"loss": returned}
    features = (arguments["context_features"], arguments["target_features"])
    return {"loss": loss, "terms": terms, "features": features if all(x is not None for x in features) else ()}


def _call_loss(loss_fn, arguments: Mapping[str, Any]):
    """Call a loss with those of predictions, targets, context_features and target_features that it takes by name.

    A loss with other argument names gets predictions and targets, in this order.
    """
    try:
        parameters = inspect.signature(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn).parameters
    except (TypeError, ValueError):
        parameters = {}
    if not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        names = {"predictions", "targets", "context_features", *({"target_features"} & set(parameters))}
    else:
        names = set(arguments) & set(parameters)
    if "predictions" not in names:
        return loss_fn(arguments["predictions"], arguments["targets"])
    return loss_fn(**{name: arguments[name] for name in arguments if name in names})
