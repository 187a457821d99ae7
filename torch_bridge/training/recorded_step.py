"""A LightningModule's training_step as a loss function: recorded once, with the calls that go to the host replayed.

Numbers of the loop (batch_idx, current_epoch, global_step, learning rates) are inputs of the record. `self.log` calls
and calls of torchmetrics' metrics, whose sums live in Python, are made after every step with what the step gives them.
"""

import contextlib
import dataclasses
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch.utils import _pytree as pytree

from jaxtrain.errors import UserError
from torch_bridge.datasets import to_torch
from torch_bridge.lowering.printing import check_text
from torch_bridge.lowering.python_inputs import SIMPLE
from torch_bridge.lowering.python_numbers import Given, Number
from torch_bridge.training.python_items import PythonItems

LOOP: tuple[str, ...] = ("current_epoch", "global_step", "batch_idx")
CHANGING = ("is_last_batch", "callback_metrics", "logged_metrics", "progress_bar_metrics", "should_stop", "fit_loop")


def _metrics() -> tuple[type, ...]:
    """Metric and MetricCollection of torchmetrics, if the user has imported it."""
    library = sys.modules.get("torchmetrics")
    return (library.Metric, library.MetricCollection) if library is not None else ()


class StepRecorder:
    """The loss function of one module's training_step, and what it does on the host.

    sides: what recorded runs have left for the host, each once: the calls (method, what of, values), and what
    training_step returns beside the loss. The names of a step's values begin with the place of theirs.
    """

    def __init__(self, module: Any, trainer: Any, takes_index: bool):
        self.trainer, self.takes_index = trainer, takes_index
        self.items = PythonItems("training_step")
        self.paths = self.items.paths
        self.sides: list[tuple[list[tuple[str, Any, Any]], dict[str, Any]]] = []
        self.kind: Callable[[Any], Any] = lambda batch: batch
        self.metrics: tuple[Any, ...] = tuple(_topmost(module))

    def batch(self, batch: Any, batch_idx: int, array: Callable = np.asarray) -> dict[str, Any]:
        """Return what the compiled step gets: the batch, and the loop's numbers as they are now.

        array: makes numbers 0-d arrays, or tensors.
        """
        trainer = self.trainer
        values: dict[str, Any] = dict(zip(LOOP, (trainer.current_epoch, trainer.global_step, batch_idx), strict=True))
        for number, group in enumerate(trainer.optimizers[0].param_groups):
            values[f"lr {number}"] = float(group["lr"])
        own = type(batch) if isinstance(batch, Mapping) else dict  # as transformers' BatchEncoding
        self.kind = (lambda given: given) if own is dict else own
        marked, arrays = self.items.arrays(batch, values, array)
        return {"batch": marked, **arrays}

    def loss(self, module: Any, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Run training_step; its loss, and what the calls on the host need."""
        numbers = self.items.stand_ins(batch)
        given = [self.kind(self.items.put(batch["batch"], numbers))]
        given += [numbers["batch_idx"]] if self.takes_index else []
        precision = self.trainer.precision_plugin.train_step_context()
        host = _Host()
        inside = _inside(module, self.trainer, numbers, host, self.metrics)
        with inside, _without_value_checks(), precision:
            output = module.training_step(*given)
        loss = output["loss"] if isinstance(output, Mapping) and "loss" in output else output
        if not isinstance(loss, torch.Tensor):
            raise UserError(f"training_step returned {type(output).__name__}, wanted a loss, or a dict with 'loss'")
        extras = {name: value for name, value in output.items() if name != "loss"} if loss is not output else {}
        place = self._place((host.calls, host.values(extras)))
        outputs = {f"{place} {name}": value for name, value in (host.outputs or {"": torch.zeros(())}).items()}
        return loss / self.trainer.accumulate_grad_batches, outputs

    def _place(self, side: tuple[list, dict]) -> int:
        """Where an equal side is kept; a new one is kept too."""
        for place, known in enumerate(self.sides):
            if _same(known, side):
                return place
        self.sides.append(side)
        return len(self.sides) - 1

    def replay(self, module: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        """Make the calls that go with a step's values, in Lightning's own place for them; return the extras."""
        place = next(iter(values)).partition(" ")[0]
        calls, extras = self.sides[int(place)]
        before = module._current_fx_name
        module._current_fx_name = "training_step"
        answers: list[Any] = []

        def real(item: Any) -> Any:
            if isinstance(item, _Value):
                value = to_torch(np.asarray(values[f"{place} {item.name}"]))
                return value if item.kind is None else item.kind(value)
            if isinstance(item, _Item):
                return self.paths.values[item.name]
            return answers[item.number] if isinstance(item, _Answer) else item

        try:
            for method, owner, (args, kwargs) in calls:
                args, kwargs = pytree.tree_map(real, (args, kwargs))
                answers.append(getattr(module if owner is None else owner, method)(*args, **kwargs))
        finally:
            module._current_fx_name = before
        return pytree.tree_map(real, extras)


@dataclasses.dataclass(frozen=True, slots=True)
class _Value:
    """A tensor that the step hands out. kind: int or float where it was a number of Python's."""

    name: str
    kind: type | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Item:
    """Something of Python's in a batch, as a text, that training_step hands on."""

    name: str


class _Answer:
    """Stand for what a call on the host will give. It can be logged."""

    __slots__ = ("number", "what")

    def __init__(self, number: int, what: str):
        self.number, self.what = number, what

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        raise next(item for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, _Answer))._refusal()

    def __getattr__(self, name: str) -> Any:
        raise self._refusal()

    def _refusal(self) -> UserError:
        return UserError(
            f"training_step computes with the value of {self.what}, which the host has only after the step: log it as "
            "it is, or compute with torchmetrics.functional"
        )

    def _refuse(self, *_: Any) -> Any:
        raise self._refusal()

    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = __getitem__ = __float__ = _refuse
    __lt__ = __gt__ = __le__ = __ge__ = __bool__ = __iter__ = _refuse


class _Host:
    """Keeps the calls that go to the host while training_step is recorded."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, Any]] = []
        self.outputs: dict[str, torch.Tensor] = {}

    def keep(self, method: str, owner: Any, what: str, args: tuple, kwargs: dict) -> _Answer:
        """Note one call; its tensors become outputs of the step."""
        self.calls.append((method, owner, self.values((args, kwargs))))
        return _Answer(len(self.calls) - 1, what)

    def values(self, items: Any) -> Any:
        """Make the tensors in a nesting outputs of the step; what stands for them."""
        return pytree.tree_map(self._output, items)

    def _output(self, item: Any) -> Any:
        if isinstance(item, Given):
            return _Item(item.name)
        check_text(item)
        kind: type | None = None
        if isinstance(item, Number):
            kind, item = type(item.value), item.tensor()
        if isinstance(item, (torch.SymFloat, torch.SymInt)):
            kind, dtype = (int, torch.int64) if isinstance(item, torch.SymInt) else (float, torch.float32)
            item = torch.scalar_tensor(cast(Any, item), dtype=dtype)
        if not isinstance(item, torch.Tensor):
            return item
        name = str(len(self.outputs))
        self.outputs[name] = item.detach()
        return _Value(name, kind)

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Stand in for LightningModule.log."""
        if isinstance(value, (bool, int, float)):
            value = torch.tensor(float(value))  # a number that changes is an input by then
        self.keep("log", None, name, (name, value, *args), options)

    def log_dict(self, values: Any, *args: Any, **options: Any) -> None:
        """Stand in for LightningModule.log_dict."""
        if isinstance(values, (_Answer, *_metrics()[1:])):
            self.keep("log_dict", None, "", (values, *args), options)
            return
        for name, value in values.items():
            self.log(name, value, *args, **options)

    def deferred(self, target: Any) -> Any:
        """Stand in for an object of the host's, as a logger is."""
        return None if target is None else _Deferred(self, target)

    def methods(self, metric: Any) -> dict[str, Callable]:
        """Return stand-ins for the methods of a metric."""
        what = f"{type(metric).__name__}, a torchmetrics metric"
        one = lambda name: lambda *args, **kwargs: self.keep(name, metric, what, args, kwargs)
        return {name: one(name) for name in ("forward", "update", "compute", "reset")}


class _Deferred:
    """An object of the host's while training_step is recorded: its plain values, and calls that are kept for later."""

    def __init__(self, host: _Host, target: Any):
        self._host, self._target = host, target

    __class__ = property(lambda self: type(self._target))  # type: ignore[assignment]  # for isinstance

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if isinstance(value, SIMPLE):
            return value
        if not isinstance(value, (types.MethodType, types.FunctionType, types.BuiltinFunctionType)):
            return _Deferred(self._host, value)
        what = f"{type(self._target).__name__}.{name}"
        return lambda *args, **kwargs: self._host.keep(name, self._target, what, args, kwargs)


class _TrainerView:
    """self.trainer while training_step is recorded: numbers of the loop are those of the record."""

    def __init__(self, trainer: Any, numbers: Mapping[str, Number], host: _Host):
        self._trainer, self._numbers, self._host = trainer, numbers, host

    def __getattr__(self, name: str) -> Any:
        if name in LOOP[:2]:
            return self._numbers[name]
        if name == "optimizers":
            return [_OptimizerView(self._numbers)]
        if name == "logger":
            return self._host.deferred(self._trainer.logger)
        if name == "loggers":
            return list(map(self._host.deferred, self._trainer.loggers))
        if name in CHANGING:
            raise UserError(f"training_step reads trainer.{name}, which changes from step to step: do it in a hook")
        return getattr(self._trainer, name)


class _OptimizerView:
    """The optimizer while training_step is recorded: its rates."""

    def __init__(self, numbers: Mapping[str, Number]):
        self.param_groups = [{"lr": number} for name, number in numbers.items() if name.startswith("lr ")]

    def __getattr__(self, name: str) -> Any:
        raise UserError(
            f"training_step reads the optimizer's {name}, which the compiled step does not know: do it in a hook"
        )


@contextlib.contextmanager
def _inside(
    module: Any, trainer: Any, numbers: Mapping[str, Number], host: _Host, metrics: tuple[Any, ...]
) -> Iterator[None]:
    """While recording: the loop's numbers are those of the record, calls of log and of metrics are kept."""
    kind = type(module)
    view = _TrainerView(trainer, numbers, host)
    fixed = {name: numbers[name] for name in LOOP[:2]} | {"trainer": view, "__module__": kind.__module__}
    fixed |= {"logger": view.logger, "loggers": view.loggers}
    own = type(kind.__name__, (kind,), fixed)
    optimizers = lambda use_pl_optimizer=True: view.optimizers[0]
    stand_ins = [(module, {"log": host.log, "log_dict": host.log_dict, "optimizers": optimizers})]
    stand_ins += [(metric, host.methods(metric)) for metric in metrics]
    before = [(item, {name: vars(item)[name] for name in new if name in vars(item)}) for item, new in stand_ins]
    module.__class__ = own
    for item, new in stand_ins:
        vars(item).update(new)
    try:
        yield
    finally:
        module.__class__ = kind
        for (item, new), (_, old) in zip(stand_ins, before, strict=True):
            for name in new:
                del vars(item)[name]
            vars(item).update(old)


@contextlib.contextmanager
def _without_value_checks() -> Iterator[None]:
    """While recording: torchmetrics' functions do not look at the values of what they get, which are not there yet."""
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


def _same(one: Any, other: Any) -> bool:
    """Tell whether two sides make the same calls with the same values of Python's."""
    (ours, spec), (theirs, structure) = pytree.tree_flatten(one), pytree.tree_flatten(other)
    return spec == structure and all(map(_equal, ours, theirs))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, _Answer) and isinstance(other, _Answer):
        return one.number == other.number
    return one is other or (type(one) is type(other) and isinstance(one, (*SIMPLE, _Value, _Item)) and one == other)


def _topmost(module: torch.nn.Module) -> Iterator[Any]:
    """The metrics of a module; those inside another are its own."""
    for child in module.children():
        if isinstance(child, _metrics()):
            yield child
        else:
            yield from _topmost(child)
