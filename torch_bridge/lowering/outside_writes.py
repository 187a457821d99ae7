"""Tensors that are neither a module's own nor its inputs: a trial call may read them, and must not write to them."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

WRITES = (
    "it writes to a tensor that belongs neither to its modules nor to the batch: give the module that holds it too, as "
    "the loss (Trainer(..., loss=module)) or to jaxtrain.compile_many"
)
_STATISTICS = {functional.batch_norm: "training", functional.instance_norm: "use_input_stats"}


def written(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that this call of a torch function writes in place."""
    found = pytree.tree_leaves(kwargs.get("out"))
    if writes(function):
        found += pytree.tree_leaves(args[:1])  # a list, of torch._foreach_add_
    if function in _STATISTICS:
        given = inspect.signature(function).bind(*args, **kwargs)
        given.apply_defaults()
        if given.arguments[_STATISTICS[function]]:
            found += [given.arguments["running_mean"], given.arguments["running_var"]]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def writes(function: Any) -> bool:
    """Return True if a torch function, by its name, writes to its first argument."""
    name = getattr(function, "__name__", "")
    return (
        name in ("__setitem__", "set_", "copy_")
        or (name.endswith("_") and not name.endswith("__"))
        or (name.startswith("__i") and name not in ("__index__", "__int__", "__invert__", "__iter__"))
    )


class Untouched(TorchFunctionMode):
    """While active, raise NotImplementedError before a write to any tensor's memory but that of these tensors, and of
    those made meanwhile."""

    def __init__(self, tensors: Iterable[torch.Tensor]):
        super().__init__()
        self._own = set(map(_memory, tensors))
        self._made: list[torch.Tensor] = []  # kept alive, so that no other tensor gets their memory

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(_memory(tensor) not in self._own for tensor in written(function, args, kwargs)):
            raise NotImplementedError(WRITES)
        result = function(*args, **kwargs)
        given = set(map(_memory, _tensors((args, kwargs))))
        for tensor in _tensors(result):
            if _memory(tensor) not in given:
                self._own.add(_memory(tensor))
                self._made.append(tensor)
        return result


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _memory(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory; its id if it has none."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (NotImplementedError, RuntimeError):
        return id(tensor)
