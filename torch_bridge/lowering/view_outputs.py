"""Outputs that are views of what a module was given: torch makes them, so that they share its memory."""

import operator
from collections.abc import Mapping
from typing import Any

import torch

_SIZES = (torch.ops.aten.sym_size.int, operator.getitem, operator.mul, operator.add, operator.sub, operator.floordiv)


def views_of_given(graph: Any) -> dict[int, torch.fx.Node]:
    """Return the output leaves that views alone make of an unchanged parameter, buffer or input, by place."""
    state = {placeholder for placeholder, name in graph.placeholders if name is not None and name not in graph.changed}
    given, leaves = state | {*graph.inputs}, enumerate(graph.output_leaves)
    return {place: node for place, node in leaves if _is_node(node) and _is_view(node) and _follows(node, given)}


def view(node: torch.fx.Node, given: Mapping[str, Any]) -> Any:
    """Make the view of the given tensors. given: by the name of their placeholder."""
    if node.op == "placeholder":
        return given[node.name]
    made = lambda inner: view(inner, given)
    target: Any = node.target
    return target(*torch.fx.map_arg(node.args, made), **torch.fx.map_arg(node.kwargs, made))


def _is_node(leaf: Any) -> bool:
    return isinstance(leaf, torch.fx.Node)


def _is_view(node: torch.fx.Node) -> bool:
    if node.target is operator.getitem:
        return _is_node(node.args[0]) and _is_view(node.args[0])  # type: ignore[arg-type]
    schema = getattr(node.target, "_schema", None)
    alias = schema.returns[0].alias_info if schema is not None and schema.returns else None
    return alias is not None and not alias.is_write


def _follows(node: torch.fx.Node, given: set[str]) -> bool:
    """Return True if a node follows from these placeholders by views and their sizes alone."""
    if node.op == "placeholder":
        return node.name in given
    if node.op != "call_function" or not (node.target in _SIZES or _is_view(node)):
        return False
    return bool(node.all_input_nodes) and all(_follows(inner, given) for inner in node.all_input_nodes)
