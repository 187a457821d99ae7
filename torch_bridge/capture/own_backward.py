"""Slopes of a captured graph, and its two halves, where torch's own backward pass is a part of it."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torch_bridge.capture.aten_program import output_of
from torch_bridge.lowering.errors import CannotRecord, code_line
from torch_bridge.lowering.pullback import Pullback


@torch.library.custom_op("torch_bridge::slope", mutates_args=())
def slope_of(value: torch.Tensor) -> torch.Tensor:
    """Stand for the slope of a result, which is an input of the backward pass."""
    return value.clone()


@slope_of.register_fake
def _(value):
    return torch.empty_like(value)


SLOPE = torch.ops.torch_bridge.slope.default


class OneMoreInput(Exception):
    """Raised for a tensor of the module that is no input of the graph yet. number: its id."""

    def __init__(self, number: int):
        self.number = number


class AsInputs(TorchFunctionMode):
    """Give torch's functions the inputs of the graph in place of the module's tensors that hooks read.

    tensors: of the module, by id. reals: those that are inputs of the graph. inputs: their values as it is traced.
    """

    def __init__(self, tensors: dict[int, torch.Tensor], reals: Sequence[Any], inputs: Sequence[Any]):
        super().__init__()
        self._tensors = tensors
        self._inputs = {id(real): value for real, value in zip(reals, inputs, strict=True)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._input, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _input(self, value: torch.Tensor) -> torch.Tensor:
        if id(value) in self._inputs:
            return self._inputs[id(value)]
        if id(value) in self._tensors:
            raise OneMoreInput(id(value))
        return value


def hooked(hooks: Sequence[Callable], grad: torch.Tensor) -> torch.Tensor:
    """Run hooks on a gradient. Raises CannotRecord for a hook that returns nothing: what it does in Python would be
    done once."""
    for hook in hooks:
        grad = hook(grad)
        if grad is None:
            raise CannotRecord(f"a hook on a gradient returns nothing, at {code_line(hook)}: return the gradient")
    return grad


def halves(
    module: torch.fx.GraphModule,
    slopes: Collection[str],
    count: int,
    ends: list[list[int]],
    of: list[str],
    closed: list[str],
) -> tuple[torch.fx.GraphModule, Pullback]:
    """Split a graph after its first `count` outputs: return the forward pass, and the gradients.

    slopes: names of the placeholders of slopes. ends: of each slope, its outputs. of, closed: placeholders of
    gradients, and those without.
    """
    parts: dict[Any, int] = {}
    for node in module.graph.nodes:  # both halves draw the same random numbers, and so does a later process
        custom = node.meta.get("custom") or {}
        part, name, run = custom.get("draw") or (None, node.name, 1)
        node.meta["custom"] = {**custom, "draw": (parts.setdefault(part, len(parts)), name, run)}
    forward, backward = _copy(module), _copy(module)
    _forget_order(forward)
    outputs: Any = output_of(module).args[0]
    passed = {n: node.name for n, node in enumerate(outputs[:count]) if getattr(node, "op", "") == "placeholder"}
    output_of(forward).args = (list(cast(Sequence, output_of(forward).args[0]))[:count],)
    output_of(backward).args = (list(cast(Sequence, output_of(backward).args[0]))[count:],)
    for half in (forward, backward):
        half.graph.eliminate_dead_code()
    for node in placeholders(forward):
        if node.name in slopes:
            forward.graph.erase_node(node)
    for half in (forward, backward):
        half.recompile()
    order = [node.name for node in placeholders(forward)]
    return forward, Pullback(
        backward,
        tuple(map(tuple, ends)),
        tuple(map(order.index, of)),
        {n: order.index(name) for n, name in passed.items()},
        frozenset(map(order.index, closed)),
    )


def open_slopes(module: torch.fx.GraphModule) -> set[str]:
    """Make the slopes placeholders, which come last. Return their names."""
    names = set()
    *_, last = placeholders(module)
    for node in [node for node in module.graph.nodes if node.target is SLOPE]:
        with module.graph.inserting_after(last):
            last = module.graph.placeholder(f"slope_{len(names)}")
        last.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(last)
        module.graph.erase_node(node)
        names.add(last.name)
    return names


def _forget_order(module: torch.fx.GraphModule) -> None:
    """Compute what a checkpoint computes again without waiting for the gradients: BatchNorm writes there too."""
    for node in [node for node in module.graph.nodes if node.target is torch.ops.torch_bridge.after.default]:
        for user in list(node.users):
            user.replace_all_uses_with(cast(Any, node.args)[0][user.args[1]])
            module.graph.erase_node(user)
        module.graph.erase_node(node)


def _copy(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return torch.fx.GraphModule(module, graph)


def placeholders(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]
