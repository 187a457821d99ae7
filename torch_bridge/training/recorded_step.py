"""A LightningModule's training_step as a loss function: recorded once, with the calls that go to the host replayed.

Numbers of the loop (batch_idx, current_epoch, global_step, learning rates) are inputs of the record. `self.log` calls
and calls of torchmetrics' metrics, whose sums live in Python, are made after every step with what the step gives them.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch.utils import _pytree as pytree

from jaxtrain.errors import UserError
from torch_bridge.datasets import to_torch
from torch_bridge.lowering.python_numbers import Number, Paths

LOOP: tuple[str, ...] = ("current_epoch", "global_step", "batch_idx")
PATH = "path"
CHANGING = ("is_last_batch", "callback_metrics", "logged_metrics", "progress_bar_metrics", "should_stop", "fit_loop")


def _metrics() -> tuple[type, ...]:
    """Metric and MetricCollection of torchmetrics, if the user has imported it."""
    library = sys.modules.get("torchmetrics")
    return (library.Metric, library.MetricCollection) if library is not None else ()


class StepRecorder:
    """The loss function of one module's training_step, and what it does on the host.

    calls: by path, what to call after a step: (method, what of, values). extras: by path, what training_step returns
    beside the loss.
    """

    def __init__(self, module: Any, trainer: Any, takes_index: bool):
        self.trainer, self.takes_index = trainer, takes_index
        self.paths = Paths("training_step")
        self.calls: dict[int, list[tuple[str, Any, Any]]] = {}
        self.extras: dict[int, dict[str, Any]] = {}
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
        integer, real = (np.int32, np.float32) if array is np.asarray else (torch.int32, torch.float32)
        arrays = {
            name: array(value, dtype=integer if isinstance(value, int) else real) for name, value in values.items()
        }
        return {"batch": batch, PATH: self.paths.of(values), **arrays}

    def loss(self, module: Any, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Run training_step; its loss, and what the calls on the host need."""
        path = self.paths.known[batch[PATH]]
        values = self.paths.values
        numbers = {name: path.number(name, values, batch[name]) for name in values}
        calls = self.calls[batch[PATH]] = []
        outputs: dict[str, torch.Tensor] = {}
        given = [self.kind(batch["batch"])] + ([numbers["batch_idx"]] if self.takes_index else [])
        precision = self.trainer.precision_plugin.train_step_context()
        host = _Host(calls, outputs)
        inside = _inside(module, self.trainer, numbers, host, self.metrics)
        with inside, _without_value_checks(), precision:
            output = module.training_step(*given)
        loss = output["loss"] if isinstance(output, Mapping) and "loss" in output else output
        if not isinstance(loss, torch.Tensor):
            raise UserError(f"training_step returned {type(output).__name__}, wanted a loss, or a dict with 'loss'")
        extras = {name: value for name, value in output.items() if name != "loss"} if loss is not output else {}
        self.extras[batch[PATH]] = host.values(extras)
        return loss / self.trainer.accumulate_grad_batches, outputs

    def replay(self, module: Any, place: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Make the calls of this path with a step's values, in Lightning's own place for them; return the extras."""
        before = module._current_fx_name
        module._current_fx_name = "training_step"
        answers: list[Any] = []

        def real(item: Any) -> Any:
            if isinstance(item, _Value):
                return to_torch(np.asarray(values[item.name]))
            return answers[item.number] if isinstance(item, _Answer) else item

        try:
            for method, owner, (args, kwargs) in self.calls[place]:
                args, kwargs = pytree.tree_map(real, (args, kwargs))
                answers.append(getattr(module if owner is None else owner, method)(*args, **kwargs))
        finally:
            module._current_fx_name = before
        return pytree.tree_map(real, self.extras[place])


class _Value:
    """A tensor that the step hands out."""

    __slots__ = ("name",)

    def __init__(self, name: str):
        self.name = name


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
            f"training_step computes with the value of {self.what}, a torchmetrics metric, which the host has only "
            "after the step: log it as it is, or compute with torchmetrics.functional"
        )

    def _refuse(self, *_: Any) -> Any:
        raise self._refusal()

    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = __getitem__ = __float__ = _refuse
    __lt__ = __gt__ = __le__ = __ge__ = __bool__ = __iter__ = _refuse


class _Host:
    """Keeps the calls that go to the host while training_step is recorded."""

    def __init__(self, calls: list, outputs: dict[str, torch.Tensor]):
        self.calls, self.outputs = calls, outputs

    def keep(self, method: str, owner: Any, what: str, args: tuple, kwargs: dict) -> _Answer:
        """Note one call; its tensors become outputs of the step."""
        self.calls.append((method, owner, self.values((args, kwargs))))
        return _Answer(len(self.calls) - 1, what)

    def values(self, items: Any) -> Any:
        """Make the tensors in a nesting outputs of the step; what stands for them."""
        return pytree.tree_map(self._output, items)

    def _output(self, item: Any) -> Any:
        if isinstance(item, Number):
            item = item.tensor()
        if isinstance(item, (torch.SymFloat, torch.SymInt)):
            item = torch.scalar_tensor(cast(Any, item))
        if not isinstance(item, torch.Tensor):
            return item
        name = str(len(self.outputs))
        self.outputs[name] = item.detach()
        return _Value(name)

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

    def methods(self, metric: Any) -> dict[str, Callable]:
        """Return stand-ins for the methods of a metric."""
        one = lambda name: lambda *args, **kwargs: self.keep(name, metric, type(metric).__name__, args, kwargs)
        return {name: one(name) for name in ("forward", "update", "compute", "reset")}


class _TrainerView:
    """self.trainer while training_step is recorded: numbers of the loop are those of the record."""

    def __init__(self, trainer: Any, numbers: Mapping[str, Number]):
        self._trainer, self._numbers = trainer, numbers

    def __getattr__(self, name: str) -> Any:
        if name in LOOP[:2]:
            return self._numbers[name]
        if name == "optimizers":
            return [_OptimizerView(self._numbers)]
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
    view = _TrainerView(trainer, numbers)
    fixed = {name: numbers[name] for name in LOOP[:2]} | {"trainer": view, "__module__": kind.__module__}
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


def _topmost(module: torch.nn.Module) -> Iterator[Any]:
    """The metrics of a module; those inside another are its own."""
    for child in module.children():
        if isinstance(child, _metrics()):
            yield child
        else:
            yield from _topmost(child)
