"""A user's loss as graphs that TorchDynamo captures: one for each way through the code that its guards tell apart.

Dynamo reads the code of the loss and of the modules that it calls, and decides at every call, by its guards, which
graph fits; what the code changes in Python it repeats after the graph has run. A loss that it cannot capture whole, or
that it is known to get wrong, is refused before anything has run.
"""

import dataclasses
import functools
import logging
import pathlib
import re
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.utils import _pytree as pytree

from jaxtrain.errors import UserError
from torch_bridge.capture import artefacts, torch_api
from torch_bridge.capture.compiled_graph import refusal
from torch_bridge.capture.joint import Captured, joint_graph
from torch_bridge.capture.reasons import reason_of
from torch_bridge.capture.unguarded import Unguarded
from torch_bridge.datasets import to_torch
from torch_bridge.lazy_scalar import LazyScalar
from torch_bridge.lowering.errors import (
    CannotRecord,
    NotCaptured,
    StaysInTorch,
    Unfollowed,
    exception_line,
    source_line,
    stays_in_torch,
)
from torch_bridge.lowering.index_checks import IndexChecks
from torch_bridge.lowering.precision_checks import PrecisionChecks
from torch_bridge.lowering.raising import raising
from torch_bridge.lowering.wide_integers import outgrowing

log = logging.getLogger(__name__)
MOST_GRAPHS = 8  # with more, half of the calls must go without a new one
_DOUBLE = (torch.float64, torch.complex128)
_LENGTH = re.compile(r"[\d/]+: (?:len\((?P<of>.*)\) == (?P<count>\d+)|not (?P<empty>\S+))")
_INTERNAL = re.compile(r"\s*(Developer debug context|For more details|Hint|Explanation):.*", re.DOTALL)


@torch.compiler.allow_in_graph
def the_loss(value: Any) -> torch.Tensor:
    """Mark the loss in Dynamo's graph. Detached, because Dynamo hands out no tensor whose graph begins inside."""
    return value.detach()


@torch.compiler.allow_in_graph
def a_logged_value(value: torch.Tensor) -> torch.Tensor:
    """Mark a value to log in Dynamo's graph."""
    return value.detach()


def _call(loss_fn: Callable, arguments: tuple, batch: Any) -> tuple:
    """Return the loss and the values to log; this is what Dynamo captures."""
    found: Any = loss_fn(*arguments, batch)
    if isinstance(found, (tuple, list)) and len(found) == 2 and isinstance(found[1], Mapping):
        logged = {}
        for name, value in found[1].items():
            if not isinstance(value, (torch.Tensor, bool, int, float)):
                raise TypeError("a value to log is no tensor or number")
            logged[name] = a_logged_value(value) if isinstance(value, torch.Tensor) else value
        return the_loss(found[0]), logged
    return the_loss(found), {}


def _call_in_bf16(loss_fn: Callable, arguments: tuple, batch: Any) -> tuple:
    """Return as `_call`, with the operators that torch's autocast chooses in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        return _call(loss_fn, arguments, batch)


@dataclasses.dataclass
class LossGraph:
    """One captured graph. loss: position of the loss among its outputs. awaited: outputs that only the caller of the
    step gets, so that they may be read later. why: the guard that did not hold, for which it was captured; "" for the
    first. guards: a line for each. program: what runs it. numbers: outputs that Python reads as floats."""

    captured: Captured
    loss: int
    awaited: frozenset[int]
    title: str
    why: str = ""
    guards: list[str] = dataclasses.field(default_factory=list)
    program: Any = None
    numbers: frozenset[int] = frozenset()

    @property
    def count(self) -> int:
        """Return the number of its operators."""
        return sum(node.op == "call_function" for node in self.captured.program.module.graph.nodes)

    @property
    def may_raise(self) -> str:
        """Name what raises in torch for some values, where this graph returns NaN; "" if nothing does."""
        return raising(self.captured.program.module)

    @functools.cached_property
    def shaped(self) -> list[int]:
        """Return the positions of the tensors among its inputs whose sizes may change from call to call."""
        program = self.captured.program
        shapes = {i: program.inputs[i].meta["val"].shape for i in program.tensors}
        return [i for i, shape in shapes.items() if any(isinstance(size, torch.SymInt) for size in shape)]

    def index_checks(self, places: Sequence[int]) -> IndexChecks:
        """Return checks that take the values of the inputs at these positions."""
        program = self.captured.program
        return IndexChecks(program.module, [program.inputs[i].name for i in places], {})

    @functools.cached_property
    def is_double(self) -> bool:
        """Return True if the graph computes in double precision, which JAX rounds to single."""
        values = (node.meta.get("val") for node in self.captured.program.module.graph.nodes)
        return any(isinstance(value, torch.Tensor) and value.dtype in _DOUBLE and value.dim() for value in values)

    def precision_checks(self, places: Sequence[int]) -> PrecisionChecks:
        """Return checks that take the values of the inputs at these positions."""
        program = self.captured.program
        return PrecisionChecks(program.module, [program.inputs[i].name for i in places], {})

    def counters(self, names: Mapping[int, str | None]) -> set[str]:
        """Return the int64 buffers that the graph may let grow beyond 32 bits. names: of weights, by position."""
        program, mutated = self.captured.program, self.captured.mutated
        places = {program.inputs[i].name: name for i, name in names.items() if name is not None}
        written = {program.outputs[n]: name for n, i in enumerate(mutated) if (name := names[i]) is not None}
        return outgrowing(program.module.graph, places, written)


def _shortened(reason: str) -> str:
    """Return why a guard did not hold, as one line: the condition, and the user's line."""
    condition, _, line = reason.partition("\n")[0].partition("#")
    condition = " ".join(condition.partition(": ")[2].split())
    return condition + (f" at {' '.join(line.split())}" if line else "")


class CapturedLoss:
    """A loss under Dynamo. Called with a batch, it runs the program of the graph that fits, and captures one if none
    does; it returns what the loss returns: the loss, and the values to log.

    arguments: the modules, as the loss is given them. differentiable: returns which of a graph's inputs, real tensors,
    to differentiate by, as positions. build: makes the program of a graph, a function of the graph's inputs that
    returns its outputs. bf16: as in a region of torch's autocast. graphs: those captured so far. calls: count so far.
    """

    def __init__(
        self,
        loss_fn: Callable,
        arguments: tuple,
        differentiable: Callable[[Sequence[Any]], list[int]],
        build: Callable[[LossGraph], Callable[[Sequence[Any]], list]],
        bf16: bool = False,
    ):
        artefacts.chosen()  # a wrong word in JAXTRAIN_LOG is told before anything is trained
        self._loss_fn, self._arguments = loss_fn, arguments
        self.name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        self._differentiable, self._build = differentiable, build
        self._failed: list[str] = []  # guards that did not hold for the present call
        self._unguarded = Unguarded()
        self._function = _call_in_bf16 if bf16 else _call
        self._captured = torch_api.whole(self._function, self._compile, self._note, self._guarded)
        self.calls = 0
        self._began = False  # whether the program of the present call has started
        self.graphs: list[LossGraph] = []

    def __call__(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Raises NotCaptured before anything has run, StaysInTorch for what neither Dynamo nor a record follows, and
        what the program raises."""
        if torch_api.is_off():
            raise NotCaptured("torch.compile is switched off in this process")
        if self._unguarded.changed():
            self._captured = torch_api.whole(self._function, self._compile, self._note, self._guarded)
        self._began = False
        self.calls += 1
        self._failed.clear()
        batch = _with_tensors(batch)
        try:
            return self._captured(self._loss_fn, self._arguments, batch)
        except Exception as error:
            if self._began:
                raise
            if not (self._failed and torch_api.is_unsupported(error)):
                raise self._refusal(error) from error
        try:  # Dynamo has taken what has changed for symbols, which code such as formatting does not take
            with torch_api.fixed_numbers():
                return self._captured(self._loss_fn, self._arguments, batch)
        except Exception as error:
            if self._began:
                raise
            raise self._refusal(error) from error

    def _refusal(self, error: Exception) -> UserError:
        """Return the error for a call that is not captured."""
        cause = torch_api.cause_of(error)
        if stays_in_torch(cause) or isinstance(error, NotCaptured):
            return error if isinstance(error, NotCaptured) else cast(UserError, cause)
        if what := torch_api.of_python(cause):
            return StaysInTorch(f"{self.name} {what}")
        return _not_captured(error)

    def _note(self, reason: str) -> None:
        self._failed.append(reason)

    def _guarded(self, guards: list[str]) -> None:
        self.graphs[-1].guards.extend(guards)

    def _compile(self, gm: torch.fx.GraphModule, fakes: Sequence[Any]) -> Callable:
        """Return the program of a graph: a backend of Dynamo's. Raises CannotRecord to refuse it."""
        if stale := torch_api.stale():
            raise StaysInTorch(f"{self.name} {stale}, which a compiled step does not follow")
        if container := torch_api.lost_writes():
            raise Unfollowed(f"it changes {container}, which Dynamo does not follow")
        if what := torch_api.keeps_padding(gm.graph):
            raise Unfollowed(f"Dynamo does not follow {what}")
        if where := torch_api.unguarded_line(symbolic=bool(self._failed)):
            raise Unfollowed(f"Dynamo does not guard what comes of {where}")
        self._check_lengths()
        if len(self.graphs) >= MOST_GRAPHS and 2 * len(self.graphs) > self.calls:
            raise Unfollowed(f"it wants another graph at most calls, here because {_shortened(self._failed[0])}")
        real = torch_api.real_inputs(gm)
        numbers = _numbers(gm)
        loss, awaited = _unmarked(gm)
        _check_weights(real, gm)
        differentiable = self._differentiable(real)
        if any(real[place]._backward_hooks or real[place]._post_accumulate_grad_hooks for place in differentiable):
            raise CannotRecord("a parameter has a hook on its gradient")  # Python code, which must run at each call
        captured = joint_graph(gm, fakes, differentiable, loss)
        if any(isinstance(real[place], torch.Tensor) and real[place].dtype in _DOUBLE for place in captured.mutated):
            raise CannotRecord("it writes to a tensor of float64 numbers")
        title = f"{self.name}, graph {len(self.graphs) + 1}"
        graph = LossGraph(captured, loss, awaited, title, _shortened(self._failed[0]) if self._failed else "")
        artefacts.show_graph(title, captured.program.module)
        if why := refusal(captured.program.module):
            raise CannotRecord(why)
        self._unguarded.note()
        graph.numbers = numbers
        form = lambda graph: (graph.loss, graph.awaited, graph.numbers)
        same = (known for known in self.graphs if form(known) == form(graph) and captured.computes_as(known.captured))
        graph.program = known.program if (known := next(same, None)) else self._build(graph)
        self.graphs.append(graph)
        weak, place = weakref.ref(self), len(self.graphs) - 1  # what torch keeps must not keep a step alive
        return lambda *inputs: weak()._run(place, inputs)

    def _run(self, place: int, inputs: Sequence[Any]) -> list:
        self._began = True
        graph = self.graphs[place]
        results = graph.program(inputs)
        for number in graph.numbers:
            results[number] = torch.tensor(results[number], dtype=torch.float64)
        return results

    def _check_lengths(self) -> None:
        """Raise Unfollowed for a container that the code makes longer at each call: each would be captured anew."""
        lengths: dict[str, set[str]] = {}
        for reason in self._failed:
            if found := _LENGTH.match(reason):
                lengths.setdefault(found["of"] or found["empty"], set()).add(found["count"] or "0")
        written = {name.replace("L['", "").replace("']", "", 1) for name in torch_api.written_sources()}
        for source, counts in lengths.items():
            if len(counts) > 1 and (source in written or source in torch_api.written_sources()):
                raise Unfollowed(f"a container that it writes to grows from call to call ({source})")


def _with_tensors(batch: Any) -> Any:
    """Return a batch with its arrays as tensors, and with plain tensors for losses that steps have returned."""
    if any(issubclass(type(leaf), np.ndarray | LazyScalar) for leaf in pytree.tree_leaves(batch)):
        return pytree.tree_map(_as_tensor, batch)
    return batch  # itself: the loss may write to it


def _as_tensor(leaf: Any) -> Any:
    kind = type(leaf)  # isinstance() would run an object's own __class__
    if issubclass(kind, LazyScalar):
        return leaf.tensor()
    return to_torch(leaf) if issubclass(kind, np.ndarray) else leaf


def _unmarked(gm: torch.fx.GraphModule) -> tuple[int, frozenset[int]]:
    """Take the marks out of a graph. Return the position of the loss among its outputs, and of all marked ones.

    A float that goes back to Python leaves Dynamo's graph as a tensor; the number itself is put in its place, so that
    what Python computes of numbers keeps all its digits.
    """
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    outputs, marked, loss = list(output.args[0]), set(), None
    for place, node in enumerate(outputs):
        if isinstance(node, torch.fx.Node) and node.target in (the_loss, a_logged_value):
            value = node.args[0]
            if node.target is the_loss:
                loss = place
                if value.meta["example_value"].numel() != 1:
                    raise CannotRecord("it returns no scalar")
            marked.add(place)
            outputs[place] = value
        elif isinstance(node, torch.fx.Node) and node.target is torch.scalar_tensor:
            outputs[place] = node.args[0]
    if loss is None:
        raise CannotRecord("its loss is no result of the call")
    output.args = (tuple(outputs),)
    for node in reversed(list(gm.graph.nodes)):
        if node.target in (the_loss, a_logged_value, torch.scalar_tensor) and not node.users:
            gm.graph.erase_node(node)
    gm.recompile()
    return loss, frozenset(marked)


def _numbers(gm: torch.fx.GraphModule) -> frozenset[int]:
    """Return the positions of the outputs that are floats, which Dynamo's code reads with item()."""
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    targets = [getattr(node, "target", None) for node in output.args[0]]
    return frozenset(place for place, target in enumerate(targets) if target is torch.scalar_tensor)


def _check_weights(inputs: Sequence[Any], gm: torch.fx.GraphModule) -> None:
    """Raise CannotRecord for weights in double precision, and for complex numbers in it: JAX rounds to single."""
    for value in inputs:
        of_module = isinstance(value, torch.nn.Parameter | torch.nn.Buffer) or getattr(value, "requires_grad", False)
        if of_module and value.dtype in _DOUBLE:
            raise CannotRecord("it has parameters in float64")
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.dtype is torch.complex128:
            where = source_line(node.stack_trace or "", own=True)
            raise CannotRecord("it computes in complex128" + (f" at {where}" if where else ""))


def _own_line(error: BaseException) -> str:
    """Return the line of this library that raised an error; "" if another's or the user's did."""
    frames = traceback.extract_tb(error.__traceback__)
    parts = pathlib.Path(frames[-1].filename).parts if frames else ()
    return f"{frames[-1].filename}:{frames[-1].lineno}" if {"torch_bridge", "jaxtrain"} & set(parts) else ""


def _not_captured(error: Exception) -> NotCaptured:
    cause = torch_api.cause_of(error)
    if not isinstance(cause, (UserError, NotImplementedError, *torch_api.CAPTURE_ERRORS)) and (own := _own_line(cause)):
        log.warning("a fault of jaxtrain, please report it: %s: %s, at %s", type(cause).__name__, cause, own)
    what = _INTERNAL.sub("", str(cause)).strip().partition("\n")[0] or type(cause).__name__
    if reason := reason_of(cause):
        what = reason
    elif not isinstance(cause, CannotRecord) and cause is not error:
        what = f"{type(cause).__name__}: {what}"
    where = source_line(torch_api.user_stack(error), own=True)
    where = where or ("" if isinstance(cause, CannotRecord) else exception_line(cause))
    return NotCaptured(what, where, isinstance(cause, Unfollowed) or torch_api.is_limit(error))
