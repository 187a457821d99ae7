"""Find the first operator and module of a torch computation whose result or gradient is not finite."""

import contextlib
import dataclasses
import itertools
import math
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torch_bridge.lowering.errors import source_line

ITSELF = "the model itself"


@dataclasses.dataclass(frozen=True)
class Fault:
    """A non-finite result or gradient.

    kind: "output" or "gradient". what: "NaN" or "infinity". module: its path and class. operator, line: the torch
    operator and the line of the user's code, "" if unknown. rows: affected rows of the batch; empty if the value is not
    per sample.
    """

    kind: str
    what: str
    module: str
    operator: str
    line: str
    rows: tuple[int, ...] = ()

    def __str__(self) -> str:
        operator = f" by {self.operator}" if self.operator else ""
        return f"the first {self.kind} that is not finite: {self.what}{operator} in {self.module}" + (
            f", at {self.line}" if self.line else ""
        )


@dataclasses.dataclass
class Found:
    """Result of a search. loss: None if it could not be computed. output, gradient: the first faults. gradients: names
    of parameters with a non-finite gradient."""

    loss: float | None = None
    output: Fault | None = None
    gradient: Fault | None = None
    gradients: list[str] = dataclasses.field(default_factory=list)


def find(module: torch.nn.Module, loss: Callable[[], torch.Tensor], rows: int) -> Found:
    """Compute a loss of the module and its gradients, checking every result. rows: batch size.

    A faulty gradient is searched for if all outputs are finite. An infinity that the code itself writes (a mask of
    -inf) is not a fault, nor is any result computed from a non-finite input.
    """
    found = Found()
    watch = _Watch(module, rows)
    with watch.hooked(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.autograd.detect_anomaly(check_nan=True), watch:
            value = loss()
        found.loss, found.output = float(value.detach()), watch.fault
        watch.backward = []
        operator = ""
        try:
            with torch.autograd.detect_anomaly(check_nan=True):
                value.backward()
        except RuntimeError as error:
            named = re.search(r"Function '(\w+?)(?:Backward\d*)?' returned nan", str(error))
            if named is None:
                raise
            operator = named.group(1)
        lines = [
            source_line(str(entry.message), own=True) for entry in caught if "Error detected" in str(entry.message)
        ]
    if found.output is None and (watch.backward or operator):
        what, name = watch.backward[0] if watch.backward else ("NaN", ITSELF)
        line = lines[0] if lines else watch.lines.get(name, "")
        found.gradient = Fault("gradient", what, name, f"the backward pass of {operator}" if operator else "", line)
    if operator:  # anomaly detection stopped the backward pass there
        module.zero_grad()
        loss().backward()
    named_gradients = ((name, p.grad) for name, p in module.named_parameters() if p.grad is not None)
    found.gradients = [name for name, gradient in named_gradients if _strange(gradient)]
    return found


def silence_dropout(module: torch.nn.Module) -> None:
    """Put dropout layers in evaluation mode: torch would draw other random numbers than the JAX step did."""
    for layer in module.modules():
        if isinstance(layer, torch.nn.modules.dropout._DropoutNd):
            layer.eval()


class _Watch(TorchFunctionMode):
    """Check the result of every torch function that is called, and track which module calls it."""

    def __init__(self, module: torch.nn.Module, rows: int):
        super().__init__()
        self.module, self.rows = module, rows
        self.fault: Fault | None = None
        self.backward: list[tuple[str, str]] = []
        self.lines: dict[str, str] = {}  # module -> line of its call
        self._within: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if self.fault is None:
            self._look(function, (args, kwargs or {}), result)
        return result

    def _look(self, function: Any, given: Any, result: Any) -> None:
        with torch._C.DisableTorchFunction():
            bad = next((leaf for leaf in _tensors(result) if _strange(leaf)), None)
            if bad is None or any(_infinite(leaf) for leaf in pytree.tree_leaves(given)):
                return
            what = "NaN" if bool(torch.isnan(bad).any()) else "infinity"
            name = self._within[-1] if self._within else ITSELF
            operator = getattr(function, "__name__", str(function))
            line = source_line("".join(traceback.format_stack()), own=True)
            self.fault = Fault("output", what, name, operator, line, self._rows(bad))

    def _rows(self, value: torch.Tensor) -> tuple[int, ...]:
        if value.dim() == 0 or value.shape[0] != self.rows:
            return ()
        rows = (~torch.isfinite(value.detach())).reshape(self.rows, -1).any(1)
        return tuple(rows.nonzero().flatten().tolist())

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Track calls of modules and check the gradients of their outputs, inside the context."""
        handles = []
        for path, layer in self.module.named_modules():
            name = f"{path or ITSELF} ({type(layer).__name__})"
            handles.append(layer.register_forward_pre_hook(self._enter(name)))
            handles.append(layer.register_forward_hook(self._leave(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str) -> Callable:
        def hook(layer, inputs):
            self._within.append(name)
            self.lines[name] = source_line("".join(traceback.format_stack()), own=True)

        return hook

    def _leave(self, name: str) -> Callable:
        def look(gradient):
            if _strange(gradient):
                self.backward.append(("NaN" if bool(torch.isnan(gradient).any()) else "infinity", name))

        def hook(layer, inputs, outputs):
            self._within.pop()
            for leaf in itertools.islice(_tensors(outputs), 8):
                if leaf.requires_grad:
                    leaf.register_hook(look)

        return hook


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _strange(value: torch.Tensor) -> bool:
    return (value.is_floating_point() or value.is_complex()) and not bool(torch.isfinite(value.detach()).all())


def _infinite(leaf: Any) -> bool:
    """Return True for an input that is already not finite: a number written in the code, or a tensor."""
    if isinstance(leaf, torch.Tensor):
        return _strange(leaf)
    return isinstance(leaf, float) and not math.isfinite(leaf)
