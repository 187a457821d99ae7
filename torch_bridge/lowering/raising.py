"""Find operators that raise in torch for some values, where a program in JAX goes on with NaN."""

from typing import Any

import torch

from torch_bridge.lowering.errors import source_line

_RAISING = set(
    "cholesky linalg_cholesky inverse linalg_inv linalg_solve _linalg_solve_ex linalg_eig linalg_eigvals linalg_eigh "
    "_linalg_eigh linalg_eigvalsh _linalg_svd linalg_svd linalg_svdvals linalg_lstsq binary_cross_entropy".split()
)
_SAME = set("view reshape squeeze unsqueeze flatten clone contiguous alias select slice permute transpose t".split())
_WITHIN_ONE = set("sigmoid softmax _softmax".split())  # results are probabilities for any input


def raising(module: torch.fx.GraphModule) -> str:
    """Name the first operator of a graph that raises in torch for some values, with its line; "" for none."""
    inner = [module for module in module.modules() if isinstance(module, torch.fx.GraphModule)]
    for node in (node for graph_module in inner for node in graph_module.graph.nodes):
        name = _name(node)
        if name in _RAISING and not (name == "binary_cross_entropy" and _is_probability(node.args[0])):
            line = source_line(node.stack_trace or "", own=True)
            return f"torch.{name.removeprefix('_').replace('linalg_', 'linalg.')}" + (f" at {line}" if line else "")
    return ""


def _is_probability(node: Any) -> bool:
    while _name(node) in _SAME:
        node = node.args[0]
    return _name(node) in _WITHIN_ONE


def _name(node: torch.fx.Node) -> str:
    return str(node.target).split(".")[1] if isinstance(node.target, torch._ops.OpOverload) else ""
