"""Compute a loss and its gradients in torch, in evaluation mode, to check if two forms of a batch are equivalent."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch

from torch_bridge.datasets import to_torch
from torch_bridge.datasets.own_generators import generators_in
from torch_bridge.lowering.errors import UnsupportedModel, WritesOutside
from torch_bridge.lowering.python.effects import Traces
from torch_bridge.lowering.python.inputs import PythonInputs
from torch_bridge.lowering.recording_lock import quiet
from torch_bridge.random_state import undrawn


def value_of(module: torch.nn.Module, loss: Callable[[Any], torch.Tensor], batch: Any) -> tuple[float, dict]:
    """Return the loss of a batch of arrays, and its gradients by parameter. Restores modes and random state."""
    modes = [(inner, inner.training) for inner in module.modules()]
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    tensors = _tensors(batch)
    with undrawn(), torch.enable_grad():
        try:
            module.eval()
            found = loss(tensors)
            grads = torch.autograd.grad(found, list(named.values()), allow_unused=True)
        finally:
            for inner, training in modes:
                inner.training = training
    pairs = zip(named, grads, strict=True)
    return float(found.detach()), {name: grad.numpy(force=True) for name, grad in pairs if grad is not None}


def _tensors(batch: Any) -> Any:
    """Replace arrays in a batch by tensors; keep its containers, including transformers' BatchEncoding."""
    if isinstance(batch, Mapping):
        inner = {key: _tensors(value) for key, value in batch.items()}
        return inner if type(batch) is dict else cast(Callable, type(batch))(inner)
    if isinstance(batch, (list, tuple)):
        values = [_tensors(value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return to_torch(batch) if isinstance(batch, np.ndarray) else batch


def uses_batch_statistics(module: torch.nn.Module) -> bool:
    """Return True if the module computes statistics over a batch, which padding would change."""
    return any(isinstance(inner, torch.nn.modules.batchnorm._BatchNorm) for inner in module.modules())


def has_collate(loader: Any) -> bool:
    """Return True for a loader over a map-style dataset whose batches a collate function makes."""
    dataset: Any = getattr(loader, "dataset", None)
    sized = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and len(dataset) > 1
    return sized and rows_of(loader) is not None and callable(getattr(loader, "collate_fn", None))


def rows_of(loader: Any) -> int | None:
    """Return the batch size of the loader or its batch sampler; None if it makes no batches."""
    own = getattr(loader, "batch_size", None)
    return getattr(getattr(loader, "batch_sampler", None), "batch_size", None) if own is None else own


def unnoticed(dataset: Any, collate: Callable, look: Callable[[], Any]) -> Any:
    """Return the result of `look`, which reads extra samples; None if that would have visible effects (the dataset
    writes to a file, or logs).

    Changes in Python, such as the dataset's own generators and counters, are undone; printed output is dropped.
    """
    # `__getitem__` by name, not `dataset[index]`: PythonInputs follows named calls, in torch's Subset too.
    read = lambda index: collate([dataset.__getitem__(index)])
    own = generators_in(dataset, "dataset") | generators_in(collate, "collate_fn")
    generators = Traces((), (), (), list(own.items())).of_code(())
    try:
        with undrawn(), quiet(), generators, PythonInputs(read, {}).effects():
            return look()
    except (UnsupportedModel, WritesOutside):
        return None
