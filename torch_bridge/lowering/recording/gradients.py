"""Record gradients that a module's own code defines or asks for.

torch.autograd.Function: its backward is recorded beside its forward and becomes jax.custom_vjp. torch.autograd.grad
becomes jax.vjp of the operators between its inputs and outputs. While a module is recorded, marker operators say where
these gradients enter and leave; `enclose` then moves the operators between into graphs of their own.
"""

import contextlib
import contextvars
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import library
from torch.autograd import function as functions
from torch.autograd.function import _is_setup_context_defined
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

library.define("torch_bridge::cotangent", "(Tensor y, int which) -> Tensor")
library.define(
    "torch_bridge::gradient", "(Tensor[] ys, Tensor[] xs, Tensor[] slopes, bool kept, bool rows) -> Tensor[]"
)
library.define(
    "torch_bridge::own_gradient",
    "(Tensor[] ys, Tensor[] cotangents, Tensor[] outputs, Tensor[] xs, Tensor[] slopes, bool zeros) -> Tensor[]",
)
library.define("torch_bridge::once", "(Tensor x) -> Tensor")
_numbers = itertools.count()
RECOMPUTED = contextvars.ContextVar("recomputed", default=False)  # inside a checkpoint that torch runs twice

OWN_GRADIENT, GRADIENT = "torch_bridge.own_gradient.default", "torch_bridge.gradient.default"
HOOK = "torch_bridge.hook.default"


@library.register_fake("torch_bridge::cotangent")
def _cotangent(y, which):
    return torch.empty_like(y)


@library.register_fake("torch_bridge::once")
def _once(x):
    return torch.empty_like(x)


@library.register_fake("torch_bridge::own_gradient")
def _own_gradient(ys, cotangents, outputs, xs, slopes, zeros):
    return [torch.empty_like(y) for y in ys]


@library.register_fake("torch_bridge::gradient")
def _gradient(ys, xs, slopes, kept, rows):
    return [x.new_empty((slopes[0].shape[0], *x.shape) if rows else x.shape) for x in xs]


class Context:
    """Carry values from a Function's forward to its backward."""

    def __init__(self, args: tuple):
        self.needs_input_grad = tuple(map(_floating, args))
        self.saved_tensors: tuple = ()
        self._unmoved: set[int] = set()
        self._zeros = True

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors

    save_for_forward = save_for_backward

    def mark_non_differentiable(self, *tensors):
        self._unmoved.update(map(id, tensors))

    def set_materialize_grads(self, value: bool):
        self._zeros = value

    def see(self, args: tuple, outputs: dict[int, torch.Tensor]) -> None:
        """Show backward what torch shows it: outputs with their history, other tensors computed in forward without.

        outputs: by the id of the tensor that forward returned.
        """
        given = set(map(id, args))

        def shown(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or id(value) in given:
                return value
            plain = not (value.is_floating_point() or value.is_complex()) or value.requires_grad
            return outputs[id(value)] if id(value) in outputs else value if plain else value.detach()

        for name, value in vars(self).items():
            if not name.startswith("_"):
                setattr(self, name, pytree.tree_map(shown, value))

    def mark_dirty(self, *tensors):
        raise NotImplementedError("an autograd.Function that writes to its inputs (mark_dirty) has no form in JAX")


def _floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def attribute(cls, name: str) -> Any:
    """Replace FunctionMeta.__getattribute__: return a Function's `forward` so that calling it records its backward too.

    `apply` itself cannot be replaced: users keep it (`scaled = Scaled.apply`), and since torch 2.14 it is no Python.
    """
    value = type.__getattribute__(cls, name)
    torchs_own = type.__getattribute__(cls, "__module__").partition(".")[0] == "torch"  # they wrap known operators
    if name != "forward" or (torchs_own and cls is not CheckpointFunction):
        return value
    return functools.partial(_forward, cls, value)


def _forward(cls, forward: Callable, *args):
    """Record a call of a Function's forward as torch makes it: context first, unless it defines setup_context."""
    if args and isinstance(args[0], Context):  # one Function's forward that calls another's
        return forward(*args)
    if _is_setup_context_defined(cls.setup_context):
        return _with_backward(cls, forward, args)
    if cls is not CheckpointFunction:
        return _with_backward(cls, forward, args[1:])
    function, _, *inner = args[1:]
    if any(isinstance(x, torch.Tensor) and x.requires_grad for x in inner):
        token = RECOMPUTED.set(True)
        try:
            return function(*inner)
        finally:
            RECOMPUTED.reset(token)
    with _recorded_mode(within=False):  # a reentrant checkpoint looks at its inputs' requires_grad only
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, function(*inner))


def _with_backward(cls, forward: Callable, args: tuple):
    context = Context(args)
    with _recorded_mode(within=False):
        if _is_setup_context_defined(cls.setup_context):
            result = forward(*args)
            cls.setup_context(context, args, result)
        else:
            result = forward(context, *args)
    if not _gradients_on():
        return result
    results = list(result) if isinstance(result, tuple) else [result]
    moved = [index for index, y in enumerate(results) if _floating(y) and id(y) not in context._unmoved]
    mark = lambda y: torch.ops.torch_bridge.cotangent(y.detach(), next(_numbers))
    cotangents, outputs = ({index: mark(results[index]) for index in moved} for _ in range(2))
    context.see(args, {id(results[index]): outputs[index] for index in moved})
    rest = lambda y: torch.zeros_like(y) if isinstance(y, torch.Tensor) and context._zeros else None
    slopes = [cotangents[index] if index in cotangents else rest(y) for index, y in enumerate(results)]
    slopes = _backward(cls.backward, context, slopes)
    pairs = [(x, g) for x, g in zip(args, slopes, strict=False) if _floating(x) and isinstance(g, torch.Tensor)]
    if moved:
        ys = torch.ops.torch_bridge.own_gradient(
            [results[index].detach() for index in moved],
            list(cotangents.values()),
            list(outputs.values()),
            [x for x, _ in pairs],
            [g if g.shape == x.shape else g.sum_to_size(x.shape) for x, g in pairs],
            context._zeros,
        )
        for index, y in zip(moved, ys, strict=True):
            results[index] = y
    return tuple(results) if isinstance(result, tuple) else results[0]


def _backward(backward: Callable, context: Context, slopes: list) -> tuple:
    """Return the gradients of a Function's backward, differentiable again unless it is once_differentiable."""
    once = getattr(backward, "__code__", None) is _ONCE
    with _recorded_mode(within=True):
        found = (backward.__wrapped__ if once else backward)(context, *slopes)
    found = found if isinstance(found, tuple) else (found,)
    return tuple(torch.ops.torch_bridge.once(g) if once and _floating(g) else g for g in found)


_ONCE = functions.once_differentiable(lambda context: None).__code__


@contextlib.contextmanager
def _recorded_mode(within: bool) -> Iterator[None]:
    """Keep the recorded gradient mode around a Function's forward. Torch turns gradients off there without a record of
    it; a block that switches the mode would restore, and record, torch's mode. within: use the recorded mode inside."""
    recorded, present = _gradients_on(), torch.is_grad_enabled()
    if within:
        _turn(recorded)
    try:
        yield
    finally:
        if _gradients_on() != recorded:
            torch._C._set_grad_enabled(recorded)
        _turn(present)


def _turn(on: bool) -> None:
    """Turn gradients on or off without recording it."""
    with torch._C.DisableTorchFunction():
        torch._C._set_grad_enabled(on)


def _gradients_on() -> bool:
    """Return True if the operators recorded next are recorded with gradients."""
    mode = get_proxy_mode()
    nodes = () if mode is None else reversed(mode.tracer.graph.nodes)
    return next((bool(node.args[0]) for node in nodes if node.target is torch._C._set_grad_enabled), True)


def grad(
    outputs,
    inputs,
    grad_outputs=None,
    retain_graph=None,
    create_graph=False,
    only_inputs=True,
    allow_unused=None,
    is_grads_batched=False,
    materialize_grads=False,
):
    """Replace torch.autograd.grad. Raises RuntimeError, as torch, for an input that no output depends on."""
    one = lambda value: [value] if isinstance(value, torch.Tensor) else list(value)
    outputs, inputs = one(outputs), one(inputs)
    slopes = [None] * len(outputs) if grad_outputs is None else one(grad_outputs)
    slopes = [torch.ones_like(y) if slope is None else slope for y, slope in zip(outputs, slopes, strict=True)]
    used = [_depends(outputs, x) or materialize_grads for x in inputs]
    if not all(used) and not allow_unused:
        raise RuntimeError("One of the differentiated Tensors appears to not have been used in the graph.")
    found = torch.ops.torch_bridge.gradient(
        outputs, [x for x, wanted in zip(inputs, used, strict=True) if wanted], slopes, create_graph, is_grads_batched
    )
    found = iter(found if create_graph else [slope.detach() for slope in found])
    return tuple(next(found) if wanted else None for wanted in used)


def _depends(outputs: list[torch.Tensor], x: torch.Tensor) -> bool:
    """Return True if the outputs may depend on x. A tensor written in place after x is read counts as an output."""
    mode = get_proxy_mode()
    nodes = [None if mode is None else _node(mode, tensor) for tensor in (x, *outputs)]
    if mode is None or None in nodes:
        return True
    reached = {nodes[0]}
    for node in mode.tracer.graph.nodes:
        if node.target is not torch.ops.aten.detach.default and reached.intersection(node.all_input_nodes):
            if getattr(getattr(node.target, "_schema", None), "is_mutable", True):
                return True
            reached.add(node)
    return not reached.isdisjoint(nodes[1:])


def _node(mode: Any, tensor: torch.Tensor) -> torch.fx.Node | None:
    slot = get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def enclose(graph_module: torch.fx.GraphModule) -> None:
    """Move the operators that a gradient needs into a graph of its own, which runs when the gradient is wanted:

    own_gradient(ys, cotangents, outputs, xs, slopes, zeros) becomes own_gradient(ys, xs, residuals, backward), where
    `backward` computes the slopes from the cotangents and the outputs saved for it; gradient(ys, xs, slopes, kept,
    rows) becomes gradient(xs, slopes, kept, rows, residuals, forward), where `forward` computes ys from xs.
    """
    inside = [inner for inner in graph_module.modules() if isinstance(inner, torch.fx.GraphModule)]
    twice = any(str(node.target) == GRADIENT and node.args[3] for inner in inside for node in inner.graph.nodes)
    for inner in inside:
        for node in list(inner.graph.nodes):
            if str(node.target) == OWN_GRADIENT:
                ys, cotangents, outputs, xs, slopes, zeros = node.args
                if not zeros:
                    _check_used(inner.graph, node, len(ys))
                node.args = (ys, xs, *part(inner, node, [*cotangents, *outputs], slopes))
                drop(inner.graph, [*cotangents, *outputs])
            elif str(node.target) == GRADIENT:
                ys, xs, slopes, *options = node.args
                node.args = (xs, slopes, *options, *part(inner, node, xs, ys))
            if str(node.target) in (OWN_GRADIENT, HOOK) and not twice:
                _cut(inner.graph, node)
        inner.recompile()


def _cut(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Detach a backward's residuals from first gradients; the mark True lets second gradients flow into them."""
    places = [place for place, value in enumerate(node.args) if getattr(value, "op", "") == "get_attr"]
    arguments: Any = node.args
    before, known, after = arguments[: places[0] - 1], list(arguments[places[0] - 1]), arguments[places[0] :]
    for place, value in enumerate(known):
        if isinstance(value.meta.get("val"), torch.Tensor):
            with graph.inserting_before(node):
                known[place] = graph.call_function(torch.ops.aten.detach.default, (value, True))
            known[place].meta = dict(value.meta)
    node.args = (*before, known, *after)


def _check_used(graph: torch.fx.Graph, node: torch.fx.Node, count: int) -> None:
    """Refuse an unused output without materialized gradients: torch passes None to backward, where JAX passes zeros."""
    used, waiting = set(), [end for end in graph.nodes if end.op == "output"]
    while waiting:
        end = waiting.pop()
        if end not in used and end.target is not torch.ops.aten.detach.default:
            used.add(end)
            waiting += end.all_input_nodes
    places: list[Any] = [user.args[1] for user in node.users if user in used]
    idle = set(range(count)) - set(places)
    if count > 1 and idle:
        raise NotImplementedError(
            "an autograd.Function calls set_materialize_grads(False), and no gradient reaches its differentiable "
            f"output {min(idle)}, for which torch gives its backward None; JAX gives zeros: leave it out, or mark it "
            "with ctx.mark_non_differentiable"
        )


def drop(graph: torch.fx.Graph, starts) -> None:
    """Remove the nodes that depend on `starts` and that nothing uses any more."""
    reached = following(graph, starts)
    for other in reversed(list(graph.nodes)):
        if other in reached and not other.users and other.op == "call_function":
            graph.erase_node(other)


def following(graph: torch.fx.Graph, starts) -> set[torch.fx.Node]:
    """Return `starts` and the nodes that depend on them."""
    reached = set(starts)
    for node in graph.nodes:
        if reached.intersection(node.all_input_nodes):
            reached.add(node)
    return reached


def sort(graph: torch.fx.Graph) -> None:
    """Put every node after its inputs, and keep the order otherwise."""
    placed: set[torch.fx.Node] = set()
    waiting = list(graph.nodes)
    last = None
    while waiting:
        node = next(node for node in waiting if placed.issuperset(node.all_input_nodes))
        if last is not None:
            last.append(node)
        placed.add(node)
        waiting.remove(node)
        last = node


def part(graph_module, node, starts, ends) -> tuple[list, torch.fx.Node]:
    """Put what computes `ends` from `starts` into a graph before `node`; return its further inputs and the graph."""
    reached = following(graph_module.graph, starts)
    wanted, stack = set(), list(ends)
    while stack:
        other = stack.pop()
        if other in reached and other not in wanted:
            wanted.add(other)
            if other not in starts:
                stack.extend(other.all_input_nodes)
    steps = [other for other in graph_module.graph.nodes if other in wanted and other not in starts]
    inside = {*steps, *starts}
    needed = [used for step in steps for used in step.all_input_nodes] + list(ends)
    needed = list(dict.fromkeys(used for used in needed if used not in inside))
    graph = torch.fx.Graph()
    residuals = [used for used in needed if used.op != "get_attr"]
    copies = {other: graph.placeholder(other.name) for other in [*starts, *residuals]}
    for step in [used for used in needed if used.op == "get_attr"] + steps:
        copies[step] = graph.node_copy(step, copies.__getitem__)
    graph.output(tuple(copies[end] for end in ends))
    name = f"{node.name}_part"
    graph_module.register_module(name, torch.fx.GraphModule(graph_module, graph))
    with graph_module.graph.inserting_before(node):
        return residuals, graph_module.graph.get_attr(name)
