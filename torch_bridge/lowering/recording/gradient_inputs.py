"""Find the inputs through which a gradient flows on: torch leaves a parameter that none reaches without a gradient.

The derivative of a linear operator does not depend on its inputs. The bias of the last layer is therefore no part of
the forces of an energy, and torch's `autograd.grad(energy, x, create_graph=True)` does not lead to it.
"""

import operator
from collections.abc import Iterable
from typing import Any

import torch

from torch_bridge.lowering.recording.gradients import GRADIENT

_LINEAR = set(
    "add sub rsub neg sum mean view _unsafe_view reshape permute transpose t expand unsqueeze squeeze cat stack select "
    "slice split split_with_sizes unbind clone alias _to_copy flip roll repeat cumsum constant_pad_nd index gather "
    "index_select diagonal triu tril narrow".split()
)
_FACTORS = {"mul": (0, 1), "mm": (0, 1), "bmm": (0, 1), "matmul": (0, 1), "mv": (0, 1), "dot": (0, 1)}
_FACTORS |= {"linear": (0, 1), "convolution": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "addmv": (1, 2)}


_CUTS = {"aten.detach.default", "aten._local_scalar_dense.default", "aten.item.default"}


def carries_gradient(node: torch.fx.Node) -> bool:
    """Return True if torch gives a node's value a history, provided its inputs have one."""
    value, name = node.meta.get("val"), str(node.target)
    if isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex()):
        return False
    of_sizes = name.startswith("aten.new_") or "_like." in name or isinstance(value, (torch.SymInt, int, float))
    return not of_sizes and name not in _CUTS


def sources(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the inputs through which a gradient of this node flows on."""
    if str(node.target) != GRADIENT or len(node.args) != 6:  # not enclosed yet
        return node.all_input_nodes
    arguments: Any = node.args
    xs, slopes, _, _, residuals, body = arguments
    enclosed: Any = node.graph.owning_module.get_submodule(body.target)
    graph = enclosed.graph
    places = [inner for inner in graph.nodes if inner.op == "placeholder"]
    reached = _reached(graph, places[: len(xs)])
    flowing = [given for given, place in zip([*xs, *residuals], places, strict=True) if place in reached]
    return [given for given in [*slopes, *flowing] if isinstance(given, torch.fx.Node)]


def _reached(graph: torch.fx.Graph, xs: list[torch.fx.Node]) -> set[torch.fx.Node]:
    """Return the nodes that the derivative of the graph's outputs with respect to xs depends on."""
    moving = set(xs)
    for node in graph.nodes:
        if carries_gradient(node) and not moving.isdisjoint(sources(node)):
            moving.add(node)
    between = moving & leading_to(node for node in graph.nodes if node.op == "output")
    return leading_to(kept for node in between if node.op == "call_function" for kept in _kept(node, moving))


def leading_to(ends: Iterable[torch.fx.Node]) -> set[torch.fx.Node]:
    """Return the nodes that a gradient of `ends` flows to, including `ends`."""
    reached: set[torch.fx.Node] = set()
    waiting = list(ends)
    while waiting:
        node = waiting.pop()
        if node not in reached and carries_gradient(node):
            reached.add(node)
            waiting += sources(node)
    return reached


def _kept(node: torch.fx.Node, moving: set[torch.fx.Node]) -> list[torch.fx.Node]:
    """Return the inputs that the derivative of an operator depends on. moving: the nodes that depend on xs."""
    kind, _, name = str(node.target).partition(".")
    name = name.partition(".")[0] if kind == "aten" else ""
    if name in _LINEAR or node.target is operator.getitem:
        return []
    if name == "div" and node.args[1] not in moving:
        return [node.args[1]] if isinstance(node.args[1], torch.fx.Node) else []
    if name not in _FACTORS:
        return sources(node)
    pair = [node.args[place] for place in _FACTORS[name]]
    return [other for one, other in (pair, pair[::-1]) if one in moving and isinstance(other, torch.fx.Node)]
