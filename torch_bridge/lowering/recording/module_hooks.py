"""Record what register_full_backward_hook and register_full_backward_pre_hook do to gradients.

A module's arguments go through `enter` and its outputs through `leave`. In the backward pass, `leave` applies the
pre-hooks and hands the outputs' gradients to `enter`, as gradients of tokens that it made; `enter` applies the hooks.
"""

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import sympy
import torch
from torch import library
from torch.utils._sympy import functions

from torch_bridge.lowering.errors import code_line
from torch_bridge.lowering.recording.gradients import drop, following, part, sort

library.define("torch_bridge::enter", "(Tensor[] xs) -> Tensor[]")
library.define(
    "torch_bridge::leave",
    "(Tensor[] xs, Tensor[] into, Tensor[] seen, Tensor[] changed_into, Tensor[] ys, Tensor[] out, "
    "Tensor[] changed_out) -> Tensor[]",
)
_numbers = itertools.count()

ENTER, LEAVE = "torch_bridge.enter.default", "torch_bridge.leave.default"


@library.register_fake("torch_bridge::enter")
def _enter(xs):
    return [torch.empty_like(x) for x in xs]


@library.register_fake("torch_bridge::leave")
def _leave(xs, into, seen, changed_into, ys, out, changed_out):
    return [torch.empty_like(y) for y in ys]


torch.fx.node.has_side_effect(torch.ops.torch_bridge.leave.default)


class ModuleHook:
    """Replacement of torch.utils.hooks.BackwardHook in one call of a module with backward hooks."""

    def __init__(self, module: torch.nn.Module, hooks: Sequence[Callable], pre_hooks: Sequence[Callable]):
        self.module, self.hooks, self.pre_hooks = module, list(hooks), list(pre_hooks)
        self.inputs: Sequence = ()
        self.given: dict[int, torch.Tensor] = {}  # by position, inputs that a gradient reaches

    def setup_input_hook(self, args: tuple) -> tuple:
        """Take the module's positional arguments; return what its forward gets in their place."""
        self.inputs, places = args, _differentiable(args)
        if not places:
            return args
        entered = torch.ops.torch_bridge.enter([args[place] for place in places])
        self.given = dict(zip(places, entered, strict=True))
        return _replaced(args, self.given)

    def setup_output_hook(self, result: Any) -> Any:
        """Take the module's output, record the hooks, and return what others see of the output."""
        outputs = result if isinstance(result, tuple) else (result,)
        places = _differentiable(outputs)
        if not places:
            return result
        ys = [outputs[place] for place in places]
        out, seen = _cotangents(ys), _cotangents(ys)
        changed_out = self._apply_pre_hooks(_filled(len(outputs), places, out))
        slopes = _filled(len(outputs), places, seen)
        into, changed_into = self._apply_hooks(slopes)
        left = torch.ops.torch_bridge.leave(
            list(self.given.values()),
            into,
            seen,
            changed_into,
            ys,
            out,
            [_like(changed_out[place], y) for place, y in zip(places, ys, strict=True)],
        )
        hooked = dict(zip(places, left, strict=True))
        return _replaced(result, hooked) if isinstance(result, tuple) else hooked[0]

    def _apply_pre_hooks(self, slopes: tuple) -> tuple:
        for hook in self.pre_hooks:
            slopes = _after(hook, slopes, lambda given, hook=hook: hook(self.module, given))
        return slopes

    def _apply_hooks(self, slopes: tuple) -> tuple[list, list]:
        """Return the gradients of the arguments, and what the hooks make of them."""
        count = len(self.inputs)
        if not self.given:
            self._apply_without_gradients(slopes)
            return [], []
        into = _cotangents(list(self.given.values()))
        changed = _filled(count, list(self.given), into)
        for hook in self.hooks:
            seen = tuple(None if slope is None else slope.clone() for slope in slopes)
            changed = _after(hook, changed, lambda given, hook=hook, seen=seen: hook(self.module, given, seen))
        return into, [_like(changed[place], x) for place, x in self.given.items()]

    def _apply_without_gradients(self, slopes: tuple) -> None:
        """Call the hooks though no argument requires a gradient, as torch does; refuse gradients that they return."""
        none = (None,) * len(self.inputs)
        for hook in self.hooks:
            found = hook(self.module, none, slopes)
            if found is not None and not (isinstance(found, tuple) and all(slope is None for slope in found)):
                raise NotImplementedError(
                    "a backward hook of a module returns gradients where no input of the module requires one; torch "
                    f"allows None only ({code_line(hook)})"
                )
            if found is None:
                stand_ins = tuple(torch.zeros_like(x) if _floating(x) else None for x in self.inputs)
                _after(hook, stand_ins, lambda given, hook=hook: hook(self.module, given, slopes))


def _after(hook: Callable, slopes: tuple, call: Callable) -> tuple:
    """Return the gradients after a hook. Raises NotImplementedError for a hook that neither returns nor changes any."""
    given = tuple(None if slope is None else slope.clone() for slope in slopes)  # the hook may write to them
    versions = [None if slope is None else slope._version for slope in given]
    found = call(given)
    if found is None:
        if versions == [None if slope is None else slope._version for slope in given]:
            raise NotImplementedError(
                f"a backward hook of a module that returns nothing ({code_line(hook)}) is there for what it does in "
                "Python (a print, a list of gradients); a compiled step would not do it: remove the hook, or let it "
                "return the gradients"
            )
        return given
    found = found if isinstance(found, (tuple, list)) else (found,)
    if len(found) != len(slopes):
        raise NotImplementedError(
            f"a backward hook of a module returned {len(found)} gradients, wanted {len(slopes)} ({code_line(hook)})"
        )
    return tuple(found)


def _floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _differentiable(values: Sequence) -> list[int]:
    if not torch.is_grad_enabled():
        return []
    places = [place for place, x in enumerate(values) if isinstance(x, torch.Tensor) and x.requires_grad]
    if any(values[place].is_complex() for place in places):
        raise NotImplementedError("a backward hook of a module on complex tensors has no form in JAX")
    return places


def _cotangents(ys: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.ops.torch_bridge.cotangent(y.detach(), next(_numbers)) for y in ys]


def _filled(count: int, places: Sequence[int], values: Sequence) -> tuple:
    found = dict(zip(places, values, strict=True))
    return tuple(found.get(place) for place in range(count))


def _replaced(values: Any, found: dict[int, torch.Tensor]) -> Any:
    items = [found.get(place, value) for place, value in enumerate(values)]
    return tuple(items) if type(values) is tuple else type(values)(*items)


def _like(slope: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    if slope is None:
        return torch.zeros_like(x)
    if slope.dim() != x.dim():
        raise NotImplementedError(
            f"a backward hook of a module changed a gradient's axes from {x.dim()} to {slope.dim()}"
        )
    return slope.to(x.dtype).expand_as(x)


def enclose(graph_module: torch.fx.GraphModule) -> None:
    """Move the operators that change gradients into graphs, for each pair of `enter` and `leave`.

    enter(xs) becomes enter(xs, sizes, dtypes, kept, places, backward) and returns tokens of these sizes after xs;
    leave(...) becomes leave(ys, tokens, sent, residuals, backward), which changes the gradients of ys, and gives the
    tokens those gradients and the values `sent`. kept and sent, in the order of places, are what the hooks use.
    """
    sources = _sources(graph_module.graph)
    for inner in list(graph_module.modules()):
        if isinstance(inner, torch.fx.GraphModule):
            nodes = [node for node in inner.graph.nodes if str(node.target) == LEAVE]
            for node in nodes:
                _enclose(inner, node, sources if inner is graph_module else {})
            if nodes:
                sort(inner.graph)
                inner.recompile()


def _enclose(graph_module: torch.fx.GraphModule, leave: torch.fx.Node, sources: dict) -> None:
    graph = graph_module.graph
    args: Any = leave.args
    xs, into, seen, changed_into, ys, out, changed_out = args
    _check_used(graph, leave)
    tokens: list[torch.fx.Node] = []
    sent: list[torch.fx.Node] = []
    if xs:
        enter: Any = xs[0].args[0]
        residuals, backward = part(graph_module, enter, [*into, *seen], changed_into)
        later = following(graph, [enter])
        sent = [value for value in residuals if value in later]
        kept = [value for value in residuals if value not in later]
        values = [node.meta["val"] for node in (*ys, *sent)]
        order = [*kept, *sent]
        given = enter.args[0]
        enter.args = (
            given,
            [[_size(graph, enter, size, sources) for size in value.shape] for value in values],
            [_carried(value.dtype) for value in values],
            kept,
            [order.index(value) for value in residuals],
            backward,
        )
        with graph.inserting_after(enter):
            places = range(len(given), len(given) + len(values))
            tokens = [graph.call_function(operator.getitem, (enter, place)) for place in places]
    leave.args = (ys, tokens, sent, *part(graph_module, leave, out, changed_out))
    drop(graph, [*into, *seen, *out])


def _check_used(graph: torch.fx.Graph, leave: torch.fx.Node) -> None:
    """Refuse a hook that computes with the gradient of an unused output, for which torch passes None."""
    arguments: Any = leave.args
    _, _, seen, changed_into, _, out, changed_out = arguments
    used = {cast(int, user.args[1]) for user in leave.users}
    for place in set(range(len(out))) - used:
        follow = following(graph, [out[place], seen[place]])
        if follow.intersection([*changed_into, *changed_out[:place], *changed_out[place + 1 :]]):
            raise NotImplementedError(
                f"a backward hook of a module computes with the gradient of output {place}, which nothing uses: torch "
                "gives the hook None for it"
            )


def _sources(graph: torch.fx.Graph) -> dict[str, tuple[torch.fx.Node, int]]:
    """Return where each free size can be read: the name of its symbol -> an input and its axis."""
    found: dict[str, tuple[torch.fx.Node, int]] = {}
    for node in graph.nodes:
        value = node.meta.get("val") if node.op == "placeholder" else None
        for axis, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                found.setdefault(size.node.expr.name, (node, axis))
    return found


def _size(graph: torch.fx.Graph, enter: torch.fx.Node, size: Any, sources: dict) -> Any:
    """Return a size as a number, or as a node before `enter` that computes it from the sizes of inputs."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.expr
    names = sorted(symbol.name for symbol in expression.free_symbols)
    if not set(names) <= sources.keys():
        raise NotImplementedError(
            f"a backward hook of a module whose output has a size ({expression}) that its inputs do not tell: register "
            "it on a tensor in forward (tensor.register_hook)"
        )
    with graph.inserting_before(enter):
        sizes = [graph.call_function(torch.ops.aten.sym_size.int, sources[name]) for name in names]
        return graph.call_function(evaluated, (str(expression), names, *sizes))


def evaluated(expression: str, names: Sequence[str], *sizes: int) -> int:
    """Return the value of an expression in sizes."""
    values: dict[str, Any] = {name: sympy.Integer(size) for name, size in zip(names, sizes, strict=True)}
    return int(cast(Any, sympy.sympify)(expression, locals=vars(functions) | values))


def _carried(dtype: torch.dtype) -> torch.dtype:
    if not dtype.is_floating_point and dtype is not torch.bool:
        raise NotImplementedError(f"a backward hook of a module that uses a {dtype} tensor made in its forward pass")
    return dtype
