"""Samples whose tensors have a class of the user's own: torch's batches have it too, those of a compiled step not."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from torch_bridge.random_state import undrawn
from torch_bridge.training.loss_entry import LossEntry

_ADVICE = (
    "a compiled step takes plain tensors: call its methods in the Dataset and return x.as_subclass(torch.Tensor), or "
    "write the loop yourself with jaxtrain.compile, which leaves such a step to torch"
)


def own_classes(items: Sequence[Any]) -> str:
    """Name the classes of tensors in these items that torch.stack keeps; "" for plain tensors."""
    leaves = [leaf for leaf in pytree.tree_leaves(list(items)) if type(leaf) is not torch.Tensor]
    kinds = {type(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return ", ".join(sorted(kind.__name__ for kind, leaf in kinds.items() if type(torch.stack([leaf])) is kind))


def methods_lost(items: Sequence[Any]) -> str:
    """Return the sentence for a module that fails on plain tensors; "" if the items are those."""
    named = own_classes(items)
    return named and f"The dataset returns tensors of the class {named}, and {_ADVICE}"


def other_with_class(task: Any, items: Sequence[Any], collate: Callable | None) -> str:
    """Compute a TorchTask's loss in torch, with tensors of their own class and with plain ones; return the sentence for
    one that differs, "" if it does not. items: as the dataset returns them. collate: the user's function."""
    named = own_classes(items)
    if not named:
        return ""
    entries = _entries((collate or default_collate)(list(items)))
    theirs, ours = _loss(task, entries), _loss(task, pytree.tree_map(_plain, entries))
    if ours is None or (theirs is not None and torch.equal(ours, theirs)):
        return ""
    name = type(task.module).__name__
    return f"{name} computes something else with the dataset's {named} than with a torch.Tensor, and {_ADVICE}"


def _entries(batch: Any) -> dict[str, Any]:
    """Name a batch's parts as jaxtrain.data.collate does."""
    if isinstance(batch, Mapping):
        return {str(key): value for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        names = getattr(batch, "_fields", range(len(batch)))
        return {str(name): value for name, value in zip(names, batch, strict=True)}
    return {"0": batch}


def _plain(leaf: Any) -> Any:
    return leaf.as_subclass(torch.Tensor) if isinstance(leaf, torch.Tensor) else leaf


def _loss(task: Any, entries: dict[str, Any]) -> torch.Tensor | None:
    """Return the loss in training mode, of copies of module and loss; None if torch cannot compute it."""
    module, criterion = copy.deepcopy((task.module, task.criterion))
    narrowed = lambda leaf: leaf.float() if getattr(leaf, "dtype", None) == torch.float64 else leaf
    entries = pytree.tree_map(narrowed, {key: entries[key] for key in task.entries})
    try:
        with undrawn(), torch.no_grad():
            torch.manual_seed(0)
            value = LossEntry(module.train(), criterion, task.plan)(entries)["value"]
    except Exception:
        return None
    return _plain(value)
