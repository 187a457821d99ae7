"""A user's loss as graphs that TorchDynamo captures: one for each way through the code that its guards tell apart.

Dynamo reads the code of the loss and of the modules that it calls, and decides at every call, by its guards, which graph
fits; what the code changes in Python it repeats after the graph has run. A loss that it cannot capture whole, or that it
is known to get wrong, is refused before anything has run.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from jaxtrain.errors import UserError
from torch_bridge.capture import artefacts, torch_api
from torch_bridge.capture.joint import Captured, joint_graph
from torch_bridge.datasets import to_torch
from torch_bridge.lazy_scalar import LazyScalar
from torch_bridge.lowering.errors import CannotRecord, exception_line, source_line
from torch_bridge.lowering.index_checks import IndexChecks
from torch_bridge.lowering.raising import raising

_DOUBLE = (torch.float64, torch.complex128)
_LENGTH = re.compile(r"len\((?P<of>.*)\) == (?P<count>\d+)")
_INTERNAL = re.compile(r"\s*(Developer debug context|For more details|Hint|Explanation):.*", re.DOTALL)


class NotCaptured(UserError):
    """Error for a call that Dynamo does not capture as one graph. Nothing of the call has run.

    what: the reason. where: "file:line  source", or "".
    """

    def __init__(self, what: str, where: str = ""):
        self.what, self.where = what, where
        super().__init__(f"{what} at {where}" if where else what)


@torch.compiler.allow_in_graph
def the_loss(value: torch.Tensor) -> torch.Tensor:
    """Mark the loss in Dynamo's graph. Detached, because Dynamo hands out no tensor whose graph begins inside."""
    return value.detach()


@torch.compiler.allow_in_graph
def a_logged_value(value: torch.Tensor) -> torch.Tensor:
    """Mark a value to log in Dynamo's graph."""
    return value.detach()


def _call(loss_fn: Callable, arguments: tuple, batch: Any) -> tuple:
    """Return the loss and the values to log; this is what Dynamo captures."""
    found = loss_fn(*arguments, batch)
    if isinstance(found, (tuple, list)) and len(found) == 2 and isinstance(found[1], Mapping):
        logged = {}
        for name, value in found[1].items():
            logged[name] = a_logged_value(value) if isinstance(value, torch.Tensor) else value
        return the_loss(found[0]), logged
    return the_loss(found), {}


@dataclasses.dataclass(frozen=True)
class LossGraph:
    """One captured graph. loss: position of the loss among its outputs. awaited: outputs that only the caller of the
    step gets, so that they may be read later. why: the guard that did not hold, for which it was captured; "" for the
    first. guards: a line for each."""

    captured: Captured
    loss: int
    awaited: frozenset[int]
    title: str
    why: str = ""
    guards: list[str] = dataclasses.field(default_factory=list)

    @property
    def count(self) -> int:
        """Return the number of its operators."""
        return sum(node.op == "call_function" for node in self.captured.program.module.graph.nodes)

    @property
    def may_raise(self) -> str:
        """Name what raises in torch for some values, where this graph returns NaN; "" if nothing does."""
        return raising(self.captured.program.module)

    def index_checks(self, places: Sequence[int]) -> Callable[[Sequence[Any], Sequence[Any]], None]:
        """Return a check that takes the values of the inputs at these positions, and all inputs, and raises
        IndexOutOfBounds where torch would refuse an index."""
        nodes = self.captured.program.inputs
        checks = IndexChecks(self.captured.program.module, [nodes[i].name for i in places], {})
        expressions = {i: node.meta["val"].node.expr for i, node in enumerate(nodes) if _is_symbol(node)}

        def check(values: Sequence[Any], every: Sequence[Any]) -> None:
            checks.check(values, lambda: {expression: every[i] for i, expression in expressions.items()})

        return check


def _is_symbol(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt) and value.node.expr.is_symbol


class CapturedLoss:
    """A loss under Dynamo. Called with a batch, it runs the program of the graph that fits, and captures one if none
    does; it returns what the loss returns: the loss, and the values to log.

    arguments: the modules, as the loss is given them. differentiable: returns which of a graph's inputs, real tensors,
    to differentiate by, as positions. build: makes the program of a graph, a function of the graph's inputs that
    returns its outputs. graphs: those captured so far.
    """

    def __init__(
        self,
        loss_fn: Callable,
        arguments: tuple,
        differentiable: Callable[[Sequence[Any]], list[int]],
        build: Callable[[LossGraph], Callable[[Sequence[Any]], list]],
    ):
        artefacts.chosen()  # a wrong word in JAXTRAIN_LOG is told before anything is trained
        self._loss_fn, self._arguments = loss_fn, arguments
        self.name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        self._differentiable, self._build = differentiable, build
        self._failed: list[str] = []  # guards that did not hold for the present call
        self._captured = torch_api.whole(_call, self._compile, self._failed.append, self._guarded)
        self._began = False  # whether the program of the present call has started
        self._lengths: dict[str, list[int]] = {}  # of containers, by source, for which graphs were captured anew
        self.graphs: list[LossGraph] = []

    def __call__(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Raises NotCaptured before anything has run, and what the program raises."""
        if torch_api.is_off():
            raise NotCaptured("torch.compile is switched off in this process")
        self._began = False
        self._failed.clear()
        try:
            found = self._captured(self._loss_fn, self._arguments, _with_tensors(batch))
        except Exception as error:
            if self._began:
                raise
            raise _not_captured(error) from error
        return found

    def _guarded(self, guards: list[str]) -> None:
        self.graphs[-1].guards.extend(guards)

    def _compile(self, gm: torch.fx.GraphModule, fakes: Sequence[Any]) -> Callable:
        """Return the program of a graph: a backend of Dynamo's. Raises CannotRecord to refuse it."""
        if torch_api.writes_bounded_deque():
            raise CannotRecord("it writes to a deque with maxlen, which Dynamo does not follow")
        self._check_lengths()
        real = torch_api.real_inputs(gm)
        loss, awaited = _unmarked(gm)
        _check_dtypes(gm)
        differentiable = self._differentiable(real)
        for place in differentiable:
            fakes[place]._backward_hooks = real[place]._backward_hooks
            if real[place]._post_accumulate_grad_hooks:
                raise CannotRecord("a parameter has a hook that runs after its gradient is stored")
        captured = joint_graph(gm, fakes, differentiable, loss)
        title = f"{self.name}, graph {len(self.graphs) + 1}"
        graph = LossGraph(captured, loss, awaited, title, self._failed[-1] if self._failed else "")
        artefacts.show_graph(title, captured.program.module)
        program = self._build(graph)
        self.graphs.append(graph)

        def run(*given: Any) -> list:
            self._began = True
            return program(given)

        return run

    def _check_lengths(self) -> None:
        """Raise CannotRecord for a container that is longer at each call: each would be captured anew."""
        for reason in self._failed[-1:]:
            if length := _LENGTH.search(reason):
                seen = self._lengths.setdefault(length["of"], [])
                seen.append(int(length["count"]))
                if len(seen) > 1 and seen[-2] < seen[-1]:
                    raise CannotRecord(f"a container grows from call to call ({length['of']})")


def _with_tensors(batch: Any) -> Any:
    """Return a batch with its arrays as tensors, and with plain tensors for losses that steps have returned."""
    if any(isinstance(leaf, np.ndarray | LazyScalar) for leaf in pytree.tree_leaves(batch)):
        return pytree.tree_map(_as_tensor, batch)
    return batch  # itself: the loss may write to it


def _as_tensor(leaf: Any) -> Any:
    if isinstance(leaf, LazyScalar):
        return leaf.tensor()
    return to_torch(leaf) if isinstance(leaf, np.ndarray) else leaf


def _unmarked(gm: torch.fx.GraphModule) -> tuple[int, frozenset[int]]:
    """Take the marks out of a graph. Return the position of the loss among its outputs, and of all marked ones."""
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
    if loss is None:
        raise CannotRecord("its loss is no result of the call")
    output.args = (tuple(outputs),)
    for node in reversed(list(gm.graph.nodes)):
        if node.target in (the_loss, a_logged_value) and not node.users:
            gm.graph.erase_node(node)
    gm.recompile()
    return loss, frozenset(marked)


def _check_dtypes(gm: torch.fx.GraphModule) -> None:
    """Raise CannotRecord for double precision, which JAX rounds to single; a number without axes is Python's."""
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.dtype in _DOUBLE and (value.dim() or node.op != "placeholder"):
            where = source_line(node.stack_trace or "", own=True)
            raise CannotRecord("it computes in float64" + (f" at {where}" if where else ""))


def _not_captured(error: Exception) -> NotCaptured:
    cause = torch_api.cause_of(error)
    what = _INTERNAL.sub("", str(cause)).strip().partition("\n")[0] or type(cause).__name__
    if not isinstance(cause, CannotRecord) and cause is not error:
        what = f"{type(cause).__name__}: {what}"
    stack = torch_api.user_stack(error)
    return NotCaptured(what, source_line(stack, own=True) or exception_line(cause))
