"""A loss and its gradients in torch itself, in evaluation mode: to see if two forms of a batch are worth the same."""

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


def value_of(module: torch.nn.Module, loss: Callable[[Any], torch.Tensor], batch: Any) -> tuple[float, dict]:
    """The loss of a batch of arrays, and its gradients by parameter. Modes and random numbers stay as they were."""
    modes = [(inner, inner.training) for inner in module.modules()]
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    tensors = _tensors(batch)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
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
    """The batch with tensors in place of arrays, in its own containers: transformers' BatchEncoding too."""
    if isinstance(batch, Mapping):
        inner = {key: _tensors(value) for key, value in batch.items()}
        return inner if type(batch) is dict else cast(Callable, type(batch))(inner)
    if isinstance(batch, (list, tuple)):
        values = [_tensors(value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return to_torch(batch) if isinstance(batch, np.ndarray) else batch


def uses_batch_statistics(module: torch.nn.Module) -> bool:
    """Return True where padding would enter statistics over a batch."""
    return any(isinstance(inner, torch.nn.modules.batchnorm._BatchNorm) for inner in module.modules())


def has_collate(loader: Any) -> bool:
    """Return True for a loader over a map-style data set whose batches a collate function makes."""
    dataset: Any = getattr(loader, "dataset", None)
    sized = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and len(dataset) > 1
    return sized and rows_of(loader) is not None and callable(getattr(loader, "collate_fn", None))


def rows_of(loader: Any) -> int | None:
    """Samples of a batch, by the loader or by its batch sampler; None where batches are not put together at all."""
    own = getattr(loader, "batch_size", None)
    return getattr(getattr(loader, "batch_sampler", None), "batch_size", None) if own is None else own


def unnoticed(dataset: Any, collate: Callable, look: Callable[[], Any]) -> Any:
    """Return what `look` gives, which reads samples that nobody asked for; None where it cannot go unnoticed (the data
    set writes to a file, or logs).

    What they change in Python, generators and counters of the data set's own, is put back; what they print is dropped.
    """
    read = lambda index: collate([dataset.__getitem__(index)])  # by a name that is followed, in torch's Subset too
    own = generators_in(dataset, "dataset") | generators_in(collate, "collate_fn")
    generators = Traces((), (), (), list(own.items())).of_code(())
    try:
        with quiet(), generators, PythonInputs(read, {}).effects():
            return look()
    except (UnsupportedModel, WritesOutside):
        return None
