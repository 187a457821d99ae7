"""torch.autograd.Function: its own backward is recorded beside its forward and becomes jax.custom_vjp.

While a module is recorded, `apply` runs both; marker operators say where the gradient enters. `enclose` then moves the
backward's operators into a graph of their own.
"""

import itertools
from typing import Any

import torch
from torch.autograd.function import _is_setup_context_defined
from torch.utils.checkpoint import CheckpointFunction

_library = torch.library.Library("torch_bridge", "FRAGMENT")
_library.define("cotangent(Tensor y, int which) -> Tensor")
_library.define("own_gradient(Tensor[] ys, Tensor[] cotangents, Tensor[] xs, Tensor[] slopes) -> Tensor[]")
_numbers = itertools.count()

COTANGENT, OWN_GRADIENT = "torch_bridge.cotangent.default", "torch_bridge.own_gradient.default"


@torch.library.register_fake("torch_bridge::cotangent", lib=_library)
def _cotangent(y, which):
    return torch.empty_like(y)


@torch.library.register_fake("torch_bridge::own_gradient", lib=_library)
def _own_gradient(ys, cotangents, xs, slopes):
    return [torch.empty_like(y) for y in ys]


class Context:
    """What a Function's forward leaves for its backward."""

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

    def mark_dirty(self, *tensors):
        raise NotImplementedError("an autograd.Function that writes to its inputs (mark_dirty) has no form in JAX")


def _floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def apply(cls, *args):
    """In place of torch.autograd.Function.apply."""
    if cls is CheckpointFunction:
        function, _, *inner = args
        return function(*inner)
    context = Context(args)
    if _is_setup_context_defined(cls.setup_context):
        result = cls.forward(*args)
        cls.setup_context(context, args, result)
    else:
        result = cls.forward(context, *args)
    results = list(result) if isinstance(result, tuple) else [result]
    moved = [index for index, y in enumerate(results) if _floating(y) and id(y) not in context._unmoved]
    cotangents = {index: torch.ops.torch_bridge.cotangent(results[index].detach(), next(_numbers)) for index in moved}
    rest = lambda y: torch.zeros_like(y) if isinstance(y, torch.Tensor) and context._zeros else None
    slopes = cls.backward(context, *(cotangents[i] if i in cotangents else rest(y) for i, y in enumerate(results)))
    slopes = slopes if isinstance(slopes, tuple) else (slopes,)
    pairs = [(x, g) for x, g in zip(args, slopes, strict=False) if _floating(x) and isinstance(g, torch.Tensor)]
    if moved:
        ys = torch.ops.torch_bridge.own_gradient(
            [results[index].detach() for index in moved],
            list(cotangents.values()),
            [x for x, _ in pairs],
            [(g if g.shape == x.shape else g.sum_to_size(x.shape)).detach() for x, g in pairs],
        )
        for index, y in zip(moved, ys, strict=True):
            results[index] = y
    return tuple(results) if isinstance(result, tuple) else results[0]


def enclose(graph_module: torch.fx.GraphModule) -> None:
    """Each own_gradient(ys, cotangents, xs, slopes) becomes own_gradient(ys, xs, residuals, backward): the operators
    that lead from the cotangents to the slopes are moved into the graph `backward`."""
    for inner in list(graph_module.modules()):
        if isinstance(inner, torch.fx.GraphModule):
            for node in list(inner.graph.nodes):
                if str(node.target) == OWN_GRADIENT:
                    _enclose(inner, node)
            inner.recompile()


def _enclose(graph_module: torch.fx.GraphModule, node: torch.fx.Node) -> None:
    ys, cotangents, xs, slopes = node.args
    reached = set(cotangents)
    for other in graph_module.graph.nodes:
        if other is not node and reached.intersection(other.all_input_nodes):
            reached.add(other)
    wanted, stack = set(), list(slopes)
    while stack:
        other = stack.pop()
        if other in reached and other not in wanted:
            wanted.add(other)
            stack.extend(other.all_input_nodes)
    steps = [other for other in graph_module.graph.nodes if other in wanted and other not in cotangents]
    inside = {*steps, *cotangents}
    residuals = list(
        dict.fromkeys(
            [used for step in steps for used in step.all_input_nodes if used not in inside]
            + [slope for slope in slopes if slope not in inside]
        )
    )
    graph = torch.fx.Graph()
    copies = {other: graph.placeholder(other.name) for other in [*cotangents, *residuals]}
    for step in steps:
        copies[step] = graph.node_copy(step, copies.__getitem__)
    graph.output(tuple(copies[slope] for slope in slopes))
    name = f"{node.name}_backward"
    backward = torch.fx.GraphModule(graph_module, graph)
    graph_module.register_module(name, backward)
    with graph_module.graph.inserting_before(node):
        held = graph_module.graph.get_attr(name)
    node.args = (ys, xs, residuals, held)
    for step in [*reversed(steps), *cotangents]:
        if not step.users:
            graph_module.graph.erase_node(step)
