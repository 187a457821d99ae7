"""Calls that a captured training_step makes on the host: of self.log, of loggers, and of torchmetrics' metrics.

They are collected while the step runs, and made after it with its values: `self.log` reads the loop's state, a logger
writes files, a metric checks and sums values in Python.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from jaxtrain.errors import UserError

LOGS = ("log", "log_dict")
OF_METRICS = ("forward", "update", "compute", "reset")


class HostCalls:
    """A LightningModule's training_step as a loss, and the calls that it makes on the host.

    bf16: as in Lightning's precision bf16-mixed.
    """

    def __init__(self, module: Any, trainer: Any, bf16: bool):
        _leave_out_value_checks()
        self._bf16 = bf16
        self._calls: list[tuple[int, str, tuple, dict]] = []
        self._outputs: list[Any] = []
        self._owners = [module, *_metrics(module), *_loggers(trainer)]
        collected: list[dict[str, Callable]] = [
            {name: functools.partial(self._collect, place, name) for name in _collected(owner, place == 0)}
            for place, owner in enumerate(self._owners)
        ]
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        rates: list[dict[str, Callable]] = [{"get_last_lr": functools.partial(_rates, one)} for one in schedulers]
        self._replaced = [*zip(self._owners, collected, strict=True), *zip(schedulers, rates, strict=True)]

    def training_step(self, module: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Return the loss of module.training_step. inputs: its "arguments", and the "divisor" of the loss."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self._bf16):
            output = module.training_step(*inputs["arguments"])
        self._outputs.append(_detached(output))
        loss = output["loss"] if isinstance(output, Mapping) and "loss" in output else output
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"training_step returned {type(loss).__name__}, wanted a loss, or a dict with 'loss'")
        return loss / inputs["divisor"]

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect the calls that are made inside the context; those before are forgotten."""
        self._calls.clear()
        self._outputs.clear()
        spaces = [(vars(owner), methods) for owner, methods in self._replaced]
        former = [{name: space[name] for name in methods if name in space} for space, methods in spaces]
        for space, methods in spaces:
            space.update(methods)
        try:
            yield
        finally:
            for (space, methods), before in zip(spaces, former, strict=True):
                for name in methods:
                    space.pop(name, None)
                space.update(before)

    def make(self) -> Any:
        """Make the collected calls, as inside Lightning's training_step; return what training_step has returned."""
        module = self._owners[0]
        results: list[Any] = []
        before, module._current_fx_name = module._current_fx_name, "training_step"
        try:
            for place, name, args, kwargs in self._calls:
                args, kwargs = pytree.tree_map(lambda item: _known(item, results), (args, kwargs))
                results.append(getattr(self._owners[place], name)(*args, **kwargs))
        finally:
            module._current_fx_name = before
        return pytree.tree_map(lambda item: _known(item, results), self._outputs[0])

    def _collect(self, place: int, name: str, *args: Any, **kwargs: Any) -> "_Result":
        self._calls.append((place, name, _detached(args), _detached(kwargs)))
        return _Result(len(self._calls) - 1)


class _Result:
    """Placeholder for the result of a collected call, which can be logged or returned, and nothing else."""

    def __init__(self, number: int):
        self.number = number

    def _refuse(self, *_: Any) -> NoReturn:
        raise UserError(
            "training_step computes with what a metric or logger returns, which the host has only after the step: log "
            "it as it is, or compute with torchmetrics.functional"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _refuse
    __lt__ = __gt__ = __le__ = __ge__ = __eq__ = __ne__ = __bool__ = __float__ = __int__ = __len__ = __iter__ = (
        __getitem__
    ) = _refuse
    __hash__ = object.__hash__


def _known(item: Any, results: list[Any]) -> Any:
    return results[item.number] if isinstance(item, _Result) else item


def _detached(value: Any) -> Any:
    """Return nested values with detached tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, (dict, list, tuple)):
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, value)
    return value


def _metrics(module: torch.nn.Module) -> Iterator[Any]:
    """Yield torchmetrics' metrics of a module, also those in lists and dicts, without those inside another metric."""
    library = sys.modules.get("torchmetrics")
    if library is None:
        return
    kinds = (library.Metric, library.MetricCollection)
    for value in vars(module).values():
        items = value.values() if type(value) is dict else value if isinstance(value, (list, tuple)) else ()
        yield from (item for item in items if isinstance(item, kinds))
    for child in module.children():
        if isinstance(child, kinds):
            yield child
        else:
            yield from _metrics(child)


def _leave_out_value_checks() -> None:
    """Capture torchmetrics' functions without their checks of values, which Python makes."""
    for key, library in list(sys.modules.items()):
        if key.startswith("torchmetrics.functional."):
            for name, function in vars(library).items():
                if name.endswith("_tensor_validation") and function not in _left_out:
                    _left_out.add(function)
                    torch.compiler.substitute_in_graph(function, skip_signature_check=True)(lambda *_, **__: None)


_left_out: set[Any] = set()


def _rates(scheduler: Any) -> list[float]:
    """Return the rates of a scheduler, whose own code TorchDynamo does not capture."""
    return scheduler._last_lr


def _loggers(trainer: Any) -> Iterator[Any]:
    """Yield the trainer's loggers, and the objects of their libraries, such as a SummaryWriter."""
    for logger in trainer.loggers:
        yield from (item for item in (logger, getattr(logger, "experiment", None)) if hasattr(item, "__dict__"))


def _collected(owner: Any, is_module: bool) -> tuple[str, ...]:
    """Return the names of the methods whose calls are collected."""
    if is_module:
        return LOGS
    if isinstance(owner, torch.nn.Module):
        return OF_METRICS
    names = (name for kind in type(owner).__mro__[:-1] for name, value in vars(kind).items() if callable(value))
    return tuple(dict.fromkeys(name for name in names if not name.startswith("_")))
