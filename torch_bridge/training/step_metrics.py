"""Handle torchmetrics metrics while a training_step that calls them is recorded."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from torch_bridge.training.step_views import Notes


def metric_classes() -> tuple[type, ...]:
    """Return torchmetrics' Metric and MetricCollection, or () if the user has not imported torchmetrics."""
    library = sys.modules.get("torchmetrics")
    return (library.Metric, library.MetricCollection) if library is not None else ()


def topmost(module: torch.nn.Module) -> Iterator[Any]:
    """Yield the metrics of a module, also in its lists and dicts, without those nested in another metric."""
    for value in vars(module).values():
        yield from _items(value)
    for child in module.children():
        if isinstance(child, metric_classes()):
            yield child
        else:
            yield from topmost(child)


def _items(value: Any) -> Any:
    """Return the metrics in a list, tuple or dict that is an attribute of a module."""
    items = value.values() if type(value) is dict else value if isinstance(value, (list, tuple)) else ()
    return [item for item in items if isinstance(item, metric_classes())]


@contextlib.contextmanager
def frozen(notes: Notes) -> Iterator[None]:
    """Inside the context, refuse updates of metrics that are not part of the module."""
    if not metric_classes():
        yield
        return
    kind = metric_classes()[0]
    set_attribute = kind.__setattr__

    def refuse(metric: Any, name: str, value: Any) -> None:
        notes.refuse(f"updates a {type(metric).__name__} that is no part of the module")

    kind.__setattr__ = refuse
    try:
        yield
    finally:
        kind.__setattr__ = set_attribute


@contextlib.contextmanager
def without_value_checks() -> Iterator[None]:
    """Disable torchmetrics' checks of input values during recording, when there are no values yet."""
    found = [
        (module, name)
        for key, module in list(sys.modules.items())
        if key.startswith("torchmetrics.functional.")
        for name in vars(module)
        if name.endswith("_tensor_validation")
    ]
    before = [getattr(module, name) for module, name in found]
    for module, name in found:
        setattr(module, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        for (module, name), function in zip(found, before, strict=True):
            setattr(module, name, function)
