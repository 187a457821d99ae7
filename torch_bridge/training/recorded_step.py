"""Record a LightningModule's training_step once as a loss function, and replay its calls to the host at every step.

Numbers of the loop (batch_idx, current_epoch, global_step, learning rates) are inputs of the record. `self.log` calls
and calls of torchmetrics metrics, whose sums are kept in Python, are made after every step with the step's values.
During recording, training_step sees views of the trainer and of the objects reached through it.
"""

import contextlib
import dataclasses
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch.utils import _pytree as pytree

from jaxtrain.errors import UserError
from torch_bridge.datasets import to_torch
from torch_bridge.lowering.operators.printing import check_text
from torch_bridge.lowering.python.changing import ChangingNumber
from torch_bridge.lowering.python.numbers import Given, Number
from torch_bridge.lowering.python.places import SIMPLE
from torch_bridge.training.python_items import PythonItems
from torch_bridge.training.step_metrics import frozen, metric_classes, topmost, without_value_checks
from torch_bridge.training.step_views import Notes, OptimizerView, SchedulerView, ViewOfNumbers, scheduler_numbers

LOOP: tuple[str, ...] = ("current_epoch", "global_step", "batch_idx")
ACCUMULATED = "accumulate_grad_batches"  # a callback may change it
CHANGING = ("is_last_batch", "callback_metrics", "logged_metrics", "progress_bar_metrics", "should_stop", "fit_loop")


class StepRecorder:
    """Loss function of a module's training_step, and its calls on the host.

    sides: distinct records of work for the host: the calls (method, its object, values), and the values that
    training_step returns besides the loss. Names of a step's values begin with the index of their entry.
    """

    def __init__(self, module: Any, trainer: Any, takes_index: bool):
        self.trainer, self.takes_index = trainer, takes_index
        self.items = PythonItems("training_step")
        self.paths = self.items.paths
        self.sides: list[tuple[list[tuple[str, Any, Any]], dict[str, Any]]] = []
        self.kind: Callable[[Any], Any] = lambda batch: batch
        self.metrics: tuple[Any, ...] = tuple(topmost(module))
        self.notes = Notes(module)
        self._attached = [inner for inner in module.modules() if "_trainer" in vars(inner)]

    def function(self) -> Callable:
        """Return `loss` as a function that hides the recorder and the trainer from the search for values that a loss
        reads."""
        own = weakref.ref(self)

        def training_step(module: Any, batch: Any) -> Any:
            return own().loss(module, batch)

        return training_step

    @contextlib.contextmanager
    def attached(self, trainer: Any = None) -> Iterator[None]:
        """Set `trainer` on the module and modules inside it, inside the context. None hides the trainer from the search
        for values that a loss reads."""
        before = [vars(inner)["_trainer"] for inner in self._attached]
        for inner in self._attached:
            vars(inner)["_trainer"] = trainer
        try:
            yield
        finally:
            for inner, trainer in zip(self._attached, before, strict=True):
                vars(inner)["_trainer"] = trainer

    def batch(self, batch: Any, batch_idx: int, input_of: Callable = ChangingNumber) -> dict[str, Any]:
        """Return the compiled step's input: the batch, and the loop's present numbers.

        input_of: converts a number to an input, as torch.tensor. Raises UserError if a recorded value has changed.
        """
        trainer = self.trainer
        if changed := self.notes.changed():
            raise UserError(f"training_step reads {changed}, which has changed since it was recorded")
        values: dict[str, Any] = dict(zip(LOOP, (trainer.current_epoch, trainer.global_step, batch_idx), strict=True))
        values[ACCUMULATED] = trainer.accumulate_grad_batches
        for number, group in enumerate(trainer.optimizers[0].param_groups):
            values[f"lr {number}"] = float(group["lr"])
        for number, config in enumerate(trainer.lr_scheduler_configs):
            values |= scheduler_numbers(config.scheduler, f"scheduler {number}")
        own = type(batch) if isinstance(batch, Mapping) else dict  # such as transformers' BatchEncoding
        self.kind = (lambda given: given) if own is dict else own
        marked, inputs = self.items.inputs(batch, values, input_of)
        return {"batch": marked, **inputs}

    def loss(self, module: Any, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Run training_step; return its loss, and the values that the calls on the host need."""
        numbers = self.items.stand_ins(batch)
        given = [self.kind(self.items.put(batch["batch"], numbers))]
        given += [numbers["batch_idx"]] if self.takes_index else []
        precision = self.trainer.precision_plugin.train_step_context()
        host = _Host(self.notes)
        self.notes.refused = ""
        with self._inside(module, numbers, host), without_value_checks(), precision:
            output = module.training_step(*given)
        if self.notes.refused:  # and training_step has caught it
            raise UserError(self.notes.refused)
        loss = output["loss"] if isinstance(output, Mapping) and "loss" in output else output
        if not isinstance(loss, torch.Tensor):
            raise UserError(f"training_step returned {type(output).__name__}, wanted a loss, or a dict with 'loss'")
        extras = {name: value for name, value in output.items() if name != "loss"} if loss is not output else {}
        place = self._place((host.calls, host.values(extras)))
        outputs = {f"{place} {name}": value for name, value in host.outputs.items()}
        outputs[f"{place} "] = torch.full((), place)  # other Python values, such as a clock's, make another record
        return cast(Any, loss) / numbers[ACCUMULATED], outputs

    @contextlib.contextmanager
    def _inside(self, module: Any, numbers: Mapping[str, Number], host: "_Host") -> Iterator[None]:
        """Set up recording: make the loop's numbers inputs of the record, keep calls of log and of metrics, and refuse
        updates of optimizers, schedulers and metrics."""
        trainer, view = self.trainer, TrainerView(self.trainer, self.notes, numbers, host)
        optimizers = lambda use_pl_optimizer=True: view.optimizers[0]
        stand_ins = [(module, {"log": host.log, "log_dict": host.log_dict, "optimizers": optimizers})]
        stand_ins += [(metric, host.methods(metric)) for metric in self.metrics]
        steppers = [*trainer.optimizers, *(config.scheduler for config in trainer.lr_scheduler_configs)]
        stand_ins += [(item, {"step": _refusing(self.notes, f"{_name(item)}.step")}) for item in steppers]
        with self.attached(view), _replaced(stand_ins), frozen(self.notes):
            yield

    def _place(self, side: tuple[list, dict]) -> int:
        """Return the index of an equal entry of `sides`; append the entry if it is new."""
        for place, known in enumerate(self.sides):
            if _same(known, side):
                return place
        self.sides.append(side)
        return len(self.sides) - 1

    def replay(self, module: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        """Make the host calls for a step's values, as inside Lightning's training_step; return the extra values."""
        place = next(iter(values)).partition(" ")[0]
        calls, extras = self.sides[int(place)]
        before = module._current_fx_name
        module._current_fx_name = "training_step"
        answers: list[Any] = []

        def real(item: Any) -> Any:
            if isinstance(item, _Value):
                value = to_torch(np.asarray(values[f"{place} {item.name}"])).to(item.dtype)
                return value if item.kind is None else item.kind(value)
            if isinstance(item, _Item):
                return self.paths.values[item.name]
            if isinstance(item, _Computed):
                return item.of(self.paths.values)
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
    """A tensor that the step returns. kind: int or float if it was a Python number."""

    name: str
    kind: type | None
    dtype: torch.dtype  # torch's dtype; the step's may be narrower


@dataclasses.dataclass(frozen=True, slots=True)
class _Item:
    """A Python value in a batch, such as a string, that training_step passes on."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Computed:
    """A number that Python computes of the loop's and the batch's numbers. form: see Number."""

    form: Any
    of: Callable[[Mapping[str, Any]], Any] = dataclasses.field(compare=False)


class _Answer:
    """Placeholder for the result of a host call. It can only be logged."""

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
    """Keep the calls for the host while training_step is recorded."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self.calls: list[tuple[str, Any, Any]] = []
        self.outputs: dict[str, torch.Tensor] = {}

    def keep(self, method: str, owner: Any, what: str, args: tuple, kwargs: dict) -> _Answer:
        """Keep a call; its tensors become outputs of the step."""
        self.calls.append((method, owner, self.values((args, kwargs))))
        return _Answer(len(self.calls) - 1, what)

    def values(self, items: Any) -> Any:
        """Make the tensors in a nested structure outputs of the step; return it with placeholders."""
        return pytree.tree_map(self._output, items)

    def _output(self, item: Any) -> Any:
        if isinstance(item, Given):
            return _Item(item.name)
        check_text(item)
        if isinstance(item, Number):
            return _Computed(item.form, item.of)
        kind: type | None = None
        if isinstance(item, (torch.SymFloat, torch.SymInt)):
            kind, dtype = (int, torch.int64) if isinstance(item, torch.SymInt) else (float, torch.float32)
            item = torch.scalar_tensor(cast(Any, item), dtype=dtype)
        if not isinstance(item, torch.Tensor):
            return item
        name = str(len(self.outputs))
        self.outputs[name] = item.detach()
        return _Value(name, kind, item.dtype)

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Replace LightningModule.log."""
        if isinstance(value, (bool, int, float)) and not isinstance(value, Number):
            value = torch.tensor(float(value))  # constant: changing numbers are inputs
        self.keep("log", None, name, (name, value, *args), options)

    def log_dict(self, values: Any, *args: Any, **options: Any) -> None:
        """Replace LightningModule.log_dict."""
        if isinstance(values, (_Answer, *metric_classes()[1:])):
            self.keep("log_dict", None, "", (values, *args), options)
            return
        for name, value in values.items():
            self.log(name, value, *args, **options)

    def deferred(self, target: Any) -> Any:
        """Return a replacement for a host object, such as a logger."""
        return None if target is None else _Deferred(self, target)

    def methods(self, metric: Any) -> dict[str, Callable]:
        """Return replacements for the methods of a metric."""
        what = f"{type(metric).__name__}, a torchmetrics metric"
        one = lambda name: lambda *args, **kwargs: self.keep(name, metric, what, args, kwargs)
        return {name: one(name) for name in ("forward", "update", "compute", "reset")}


class _Deferred:
    """Replacement for a host object while training_step is recorded: plain values are read, calls are kept for
    later."""

    def __init__(self, host: _Host, target: Any):
        vars(self).update(_host=host, _target=target)

    __class__ = property(lambda self: type(self._target))  # type: ignore[assignment]  # for isinstance

    def __getattr__(self, name: str) -> Any:
        target, what = self._target, f"{type(self._target).__name__}.{name}"
        value = getattr(target, name)
        if isinstance(value, SIMPLE):
            return self._host.notes.note(what, lambda: getattr(target, name))
        if not isinstance(value, (types.MethodType, types.FunctionType, types.BuiltinFunctionType)):
            return _Deferred(self._host, value)
        return lambda *args, **kwargs: self._host.keep(name, self._target, what, args, kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        self._host.notes.refuse(f"sets {type(self._target).__name__}.{name}, which has to happen at every step")


class TrainerView(ViewOfNumbers):
    """View of the trainer while training_step is recorded: numbers of the loop are inputs of the record."""

    __slots__ = ("_host",)

    def __init__(self, trainer: Any, notes: Notes, numbers: Mapping[str, Number], host: _Host):
        super().__init__("trainer", trainer, notes, numbers)
        object.__setattr__(self, "_host", host)

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        _, trainer, notes = self._view
        numbers, host = self._numbers, self._host
        if name in LOOP[:2]:
            return numbers[name]
        if name == "optimizers":
            return [OptimizerView(_name(trainer.optimizers[0]), trainer.optimizers[0], notes, numbers)]
        if name == "lr_scheduler_configs":
            configs = enumerate(trainer.lr_scheduler_configs)
            return [_ConfigView(f"scheduler {number}", config, notes, numbers) for number, config in configs]
        if name == "logger":
            return host.deferred(trainer.logger)
        if name == "loggers":
            return list(map(host.deferred, trainer.loggers))
        if name in CHANGING:
            notes.refuse(f"reads trainer.{name}, which changes from step to step: do it in a hook")
        return super().__getattr__(name)


class _ConfigView(ViewOfNumbers):
    """View of a scheduler with Lightning's settings for it."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        place, target, notes = self._view
        if name == "scheduler":
            return SchedulerView(_name(target.scheduler), target.scheduler, notes, self._numbers, place)
        return super().__getattr__(name)


@contextlib.contextmanager
def _replaced(stand_ins: list[tuple[Any, dict[str, Any]]]) -> Iterator[None]:
    """Set these attributes on the objects, inside the context."""
    before = [(item, {name: vars(item)[name] for name in new if name in vars(item)}) for item, new in stand_ins]
    for item, new in stand_ins:
        vars(item).update(new)
    try:
        yield
    finally:
        for (item, new), (_, old) in zip(stand_ins, before, strict=True):
            for name in new:
                vars(item).pop(name, None)
            vars(item).update(old)


def _name(item: Any) -> str:
    return type(item).__name__


def _refusing(notes: Notes, what: str) -> Callable:
    """Return a replacement for a method that a record must not call."""
    return lambda *args, **kwargs: notes.refuse(f"calls {what}, which has to happen at every step")


def _same(one: Any, other: Any) -> bool:
    """Return True if two entries make the same calls with the same Python values."""
    (ours, spec), (theirs, structure) = pytree.tree_flatten(one), pytree.tree_flatten(other)
    return spec == structure and all(map(_equal, ours, theirs))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, _Answer) and isinstance(other, _Answer):
        return one.number == other.number
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, types.FunctionType):  # a lambda defined in training_step
        return one.__code__ is other.__code__ and not (one.__defaults__ or one.__closure__)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return isinstance(one, (*SIMPLE, _Value, _Item, _Computed)) and one == other
