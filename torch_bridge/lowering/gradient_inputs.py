"""Find the inputs through which a gradient flows on: torch leaves a parameter that none reaches without a gradient."""

from collections.abc import Iterable

import torch

_CUTS = {"aten.detach.default", "aten._local_scalar_dense.default", "aten.item.default"}


def carries_gradient(node: torch.fx.Node) -> bool:
    """Return True if torch gives a node's value a history, provided its inputs have one."""
    value, name = node.meta.get("val"), str(node.target)
    if isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex()):
        return False
    of_sizes = name.startswith("aten.new_") or "_like." in name or isinstance(value, (torch.SymInt, int, float))
    return not of_sizes and name not in _CUTS


def leading_to(ends: Iterable[torch.fx.Node]) -> set[torch.fx.Node]:
    """Return the nodes that a gradient of `ends` flows to, including `ends`."""
    reached: set[torch.fx.Node] = set()
    waiting = list(ends)
    while waiting:
        node = waiting.pop()
        if node not in reached and carries_gradient(node):
            reached.add(node)
            waiting += node.all_input_nodes
    return reached
