"""Which operators torch takes apart before JAX sees them, and which have no lowering."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_bridge.capture import torch_api
from torch_bridge.lowering import selections
from torch_bridge.lowering.errors import CannotRecord, Obstacle, module_path, source_line
from torch_bridge.lowering.nested_graphs import HIGHER_ORDER
from torch_bridge.lowering.operators import TABLE
from torch_bridge.lowering.operators.views import in_order

# torch takes these apart by other rules for autograd than for export; with lowerings, they stay whole in both halves.
_TAKEN_APART = {"aten.contiguous.default", "aten.t.default", "aten.transpose.int", "aten.reshape.default"} | {
    f"aten.{name}.default"
    for name in ("cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d", "native_batch_norm")
}
# One half of a pair: what forward keeps for backward is the kernel's own, so neither half may be taken apart alone.
_PAIRS = ("flash_attention", "efficient_attention", "cudnn", "miopen", "mkldnn", "_rnn", "_fused_sdp")
_DTYPES = {getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)} | {torch.bool, torch.uint8}
_DTYPES |= {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}


@functools.cache
def rules() -> dict[Any, Callable]:
    """Return torch's rules for the operators that have no lowering and that can be taken apart."""
    keep = TABLE.keys() - _TAKEN_APART
    every = {**torch_api.core_decompositions(), **torch.export.default_decompositions()}
    pairs = lambda name: any(word in name for word in _PAIRS)
    return {
        operator: rule for operator, rule in every.items() if str(operator) not in keep and not pairs(str(operator))
    }


def rules_with_factors() -> dict[Any, Callable]:
    """Return `rules()`, for graphs that torch differentiates: its backward passes read the factors of a determinant,
    which the lowerings leave out because JAX's derivatives need none."""
    aten = torch.ops.aten
    return rules() | {aten._linalg_det.default: _det, aten._linalg_slogdet.default: _slogdet}


def _det(matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute a determinant with the factors that torch's backward pass solves with."""
    diagonal, parity, factors, pivots = _factored(matrix)
    return diagonal.prod(-1) * parity, factors, pivots


def _slogdet(matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
    diagonal, parity, factors, pivots = _factored(matrix)
    return diagonal.sgn().prod(-1) * parity, diagonal.abs().log().sum(-1), factors, pivots


def _factored(matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return U's diagonal, the sign of the permutation, both factors and the pivots."""
    transposed = matrix.is_contiguous() and not matrix.is_complex()  # torch's backward pass counts on this choice
    factors, pivots, _ = torch.ops.aten.linalg_lu_factor_ex.default(matrix.mT if transposed else matrix)
    in_place = torch.arange(1, matrix.shape[-1] + 1, dtype=pivots.dtype, device=pivots.device)
    parity = 1 - 2 * ((pivots != in_place).sum(-1) % 2).to(matrix.dtype)
    return factors.diagonal(0, -2, -1), parity, factors, pivots


def without_lowering(module: torch.fx.GraphModule) -> set[str]:
    """Return the names of the graph's operators, and dtypes, that JAX cannot compute."""
    found: set[str] = set()
    for inner in module.modules():
        for node in inner.graph.nodes if isinstance(inner, torch.fx.GraphModule) else ():
            if node.op != "call_function":
                continue
            operators = torch._ops.OpOverload | torch._ops.HigherOrderOperator
            name = str(node.target)
            has_lowering = name in TABLE or name in HIGHER_ORDER or selections.makes(node)
            if isinstance(node.target, operators) and (not has_lowering or _reads_memory(node)):
                found.add(name)
            values = node.meta.get("val")
            for value in values if isinstance(values, tuple | list) else (values,):
                if isinstance(value, torch.Tensor) and value.dtype not in _DTYPES:
                    found.add(f"{name} with {value.dtype}")
    return found


def refusal(module: torch.fx.GraphModule) -> str:
    """Return which of the graph's operators JAX cannot compute, with the first line that calls one; "" for none."""
    missing = without_lowering(module)
    if not missing:
        return ""
    what = f"no lowering for {', '.join(sorted(missing))}"
    if missing == {"with_effects"}:  # torch keeps such checks in their order
        what = "it checks a matrix as it computes (write torch.linalg.cholesky_ex, inv_ex or solve_ex)"
    graphs = [inner.graph for inner in module.modules() if isinstance(inner, torch.fx.GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes if str(node.target) in missing]
    calls = [call for node in nodes for call in (node, *node.all_input_nodes)]  # a check has no line of its own
    where = next((f", at {line}" for call in calls if (line := source_line(call.stack_trace))), "")
    return what + where


class NoLowering(CannotRecord):
    """Error for operators that JAX cannot compute. obstacles: each, with its line and module."""

    def __init__(self, obstacles: list[Obstacle]):
        self.obstacles = obstacles
        super().__init__(", ".join(dict.fromkeys(obstacle.what for obstacle in obstacles)))


def check(module: torch.fx.GraphModule) -> None:
    """Raise NoLowering with everything in a graph that JAX cannot compute."""
    missing = without_lowering(module)
    graphs = [inner.graph for inner in module.modules() if isinstance(inner, torch.fx.GraphModule)] if missing else []
    found = [
        Obstacle(what, source_line(node.stack_trace), module_path(node))
        for node, what in selections.obstacles(module.graph)
    ]
    reported = {obstacle.where for obstacle in found}
    for node in (node for graph in graphs for node in graph.nodes):
        name = str(node.target)
        if name in missing and source_line(node.stack_trace) not in reported:
            what = _OF_MEMORY.format(name) if _reads_memory(node) else f"{name} has no lowering"
            found.append(Obstacle(what, source_line(node.stack_trace), module_path(node)))
        dtype = next((each.removeprefix(f"{name} with ") for each in missing if each.startswith(f"{name} with ")), "")
        if dtype and any(str(value.dtype) == dtype for value in _tensors(node.meta.get("val"))):
            what = f"{name} makes numbers of {dtype}, which JAX does not have"
            found.append(Obstacle(what, source_line(node.stack_trace), module_path(node)))
    if found:
        raise NoLowering(found)


_OF_MEMORY = "{} addresses the memory of a view: call .contiguous().clone() before it"


def _tensors(value: Any) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]


def _reads_memory(node: torch.fx.Node) -> bool:
    """Return True for an operator whose result depends on where the numbers of a tensor that is not contiguous lie."""
    name = str(node.target)
    if name.startswith(("aten.as_strided", "aten.sym_stride", "aten.sym_storage_offset")):
        return not in_order(node.args[0].meta["val"])
    return False
