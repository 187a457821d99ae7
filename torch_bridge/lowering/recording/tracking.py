"""Record what autograd does not see: blocks under torch.no_grad(), and writes that bypass it.

A write under no_grad, through `.data` or through a detached alias changes a tensor's numbers and leaves its gradient as
it was. In a functional graph the write makes another value; marker operators give it the gradient of the value before.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import library

library.define("torch_bridge::rewritten", "(Tensor value, Tensor before) -> Tensor")

NO_GRAD = "wrap_with_set_grad_enabled"


@library.register_fake("torch_bridge::rewritten")
def _rewritten(value, before):
    return torch.empty_like(value)


def untrack(graph_module: torch.fx.GraphModule, tracked: bool = True) -> None:
    """Cut the gradients of values computed under torch.no_grad(), which decomposition would forget, and keep those of
    tensors only written there. The graph is one of torch.export before decomposition."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if isinstance(node.target, torch._ops.OpOverload):
            for written in _written(node):
                base, detached = _origin(written)
                if _graded(base) and (detached or (not tracked and base.op == "placeholder")):
                    _keep_gradient(graph, node, base)
            continue
        bodies = [getattr(graph_module, used.target) for used in node.all_input_nodes if used.op == "get_attr"]
        switches = str(node.target) == NO_GRAD
        for body in bodies:
            if isinstance(body, torch.fx.GraphModule):
                untrack(body, bool(node.args[0]) if switches else tracked)
        if switches and not node.args[0]:
            _cut(graph, node, bodies[0])
    graph_module.recompile()


def _written(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Yield the tensors that an operator writes to."""
    for number, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[number] if number < len(node.args) else node.kwargs.get(argument.name)
            yield from (item for item in _leaves(value) if isinstance(item, torch.fx.Node))


def _leaves(value: Any) -> list:
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, (list, tuple)) else [value]


def _origin(node: torch.fx.Node) -> tuple[torch.fx.Node, bool]:
    """Return the tensor whose memory the node shows, and whether a detached alias lies between."""
    detached = False
    while True:
        source = _shown(node)
        if source is None:
            return node, detached
        detached = detached or node.target is torch.ops.aten.detach.default
        node = source


def _shown(node: Any) -> torch.fx.Node | None:
    """Return the tensor that a view, or an in-place operator, refers to."""
    if node.op != "call_function":
        return None
    if not isinstance(node.target, torch._ops.OpOverload):
        picks = getattr(node.target, "__name__", "") == "getitem" and isinstance(node.args[0], torch.fx.Node)
        return _shown(node.args[0]) if picks and isinstance(node.args[0].target, torch._ops.OpOverload) else None
    schema = node.target._schema
    if not any(result.alias_info is not None for result in schema.returns):
        return None
    for number, argument in enumerate(schema.arguments[: len(node.args)]):
        if argument.alias_info is not None and isinstance(node.args[number], torch.fx.Node):
            return node.args[number]
    return None


def _keep_gradient(graph: torch.fx.Graph, write: torch.fx.Node, base: torch.fx.Node) -> None:
    with graph.inserting_before(write):
        before = graph.call_function(torch.ops.aten.clone.default, (base,))
    with graph.inserting_after(write):
        value = graph.call_function(torch.ops.torch_bridge.rewritten.default, (base, before))
    with graph.inserting_after(value):
        copied = graph.call_function(torch.ops.aten.copy_.default, (base, value))
    for made in (before, value, copied):
        made.meta = dict(base.meta) | {"stack_trace": write.stack_trace}


def _cut(graph: torch.fx.Graph, block: torch.fx.Node, body: torch.fx.GraphModule) -> None:
    (output,) = (node for node in body.graph.nodes if node.op == "output")
    for result in list(block.users):
        inner = output.args[0][result.args[1]]
        while isinstance(inner, torch.fx.Node) and _in_place(inner):
            inner = inner.args[0]
        if isinstance(result.meta.get("val"), torch.Tensor) and inner.op != "placeholder":  # else the outer tensor
            _detach(graph, result)


def _graded(node: torch.fx.Node) -> bool:
    """Return False for a tensor that has no gradient, as a counter of batches."""
    dtype = getattr(node.meta.get("val"), "dtype", None)
    return dtype is None or dtype.is_floating_point or dtype.is_complex


def _in_place(node: torch.fx.Node) -> bool:
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and bool(node.args)
        and isinstance(node.args[0], torch.fx.Node)
        and any(written is node.args[0] for written in _written(node))
        and _shown(node) is node.args[0]
    )


def _detach(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    if not _graded(node):
        return
    users = list(node.users)
    with graph.inserting_after(node):
        cut = graph.call_function(torch.ops.aten.detach.default, (node,))
    cut.meta = dict(node.meta)
    for user in users:
        user.replace_input_with(node, cut)
