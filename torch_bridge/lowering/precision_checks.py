"""Find float64 arithmetic on a batch for which float32 keeps too few digits: `(timestamp - start).float()`.

JAX computes in float32 here, which keeps seven digits: enough for measurements and features, but a second in the year
2026 is known to two minutes only. Therefore everything that a graph makes in float64 of the batch and of constants
alone, before weights come in, is computed twice on the host: in float64, and with every result rounded to float32. The
whole graph is computed twice if weights enter float64, as in `cholesky(kernel.double() + 1e-8 * eye)`.
"""

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from torch_bridge.datasets import to_torch
from torch_bridge.lowering.errors import source_line
from torch_bridge.lowering.host_graph import HostPart, HostProgram, Symbols, without_mark
from torch_bridge.random_state import undrawn

TOLERANCE = 1e-3  # relative to the largest value; for integers and bools, the share of changed entries
MOST_ELEMENTS = 10**8  # of weights and batch together; a larger graph is not run twice

log = logging.getLogger(__name__)


class PrecisionChecks:
    """Precision checks of a graph; takes the arguments of IndexChecks."""

    def __init__(self, module: torch.fx.GraphModule, inputs: Sequence[str], constants: Mapping[str, Any]):
        part = HostPart(module, inputs, constants, lambda value: not value.is_complex())
        touched: set[torch.fx.Node] = set()  # nodes computed from float64
        self._graph = module
        self._of_weights: list[torch.fx.Node] = []  # float64 nodes that depend on weights
        self._targets: list[torch.fx.Node] = []
        for node in module.graph.nodes:
            if node.op == "placeholder":
                if node.name in part.inputs and _dtype(node) is torch.float64:
                    touched.add(node)
            elif part.has(node) and (_dtype(node) is torch.float64 or touched & {*node.all_input_nodes}):
                touched.add(node)
            else:  # weights come in here, or the graph ends
                self._of_weights += [node] if _dtype(node) is torch.float64 else []
                self._targets += [n for n in node.all_input_nodes if n in touched and n.op != "placeholder"]
        self._targets = [node for node in dict.fromkeys(self._targets) if _dtype(node) is not None]
        self._program = HostProgram(part, self._targets) if self._targets else None

    def loss(self, leaves: Sequence[Any], symbols: Symbols) -> str:
        """Describe where and how far float32 departs from torch on this batch; "" if it doesn't, or can't be seen."""
        if self._program is None:
            return ""
        values = self._program.arguments(leaves, functools.cache(symbols))
        if values is None:
            return ""
        with torch.no_grad():
            exact = self._program.module(*values)
            rounded = _InFloat32(self._program.module).run(*values)
        for node, right, wrong in zip(self._targets, exact, rounded, strict=True):
            told = _departs(right, wrong)
            if told:
                where = source_line(getattr(node, "stack_trace", None) or "", own=True)
                return f"float64 values are float32 here, which changes {told}{where and f', at {where}'}"
        return ""

    def loss_inside(self, arguments: Callable[[], Sequence[Any] | None]) -> str:
        """Do as `loss` for float64 that the graph makes of its weights. arguments: returns the placeholders' values, as
        arrays in host memory or tensors, or None if they are unavailable."""
        values = arguments() if self._of_weights else None
        if values is None or sum(math.prod(getattr(value, "shape", ())) for value in values) > MOST_ELEMENTS:
            return ""
        nodes = [node for node in self._graph.graph.nodes if node.op == "placeholder"]
        given = [_as_recorded(node, value) for node, value in zip(nodes, values, strict=True)]
        try:
            exact = self._run(_InTorch, given)
        except Exception as error:  # an operator that only records have, and torch cannot run
            log.info("float64 inside a graph is not looked at: %s", error)
            return ""
        told = self._departs_rounded(exact, given)
        where = told and source_line(getattr(self._of_weights[0], "stack_trace", None) or "", own=True)
        return told and f"float64 is float32 here, which {told}{where and f', from {where} on'}"

    def _departs_rounded(self, exact: list, given: list) -> str:
        try:
            rounded = self._run(_InFloat32, given)
        except Exception as error:  # e.g. a factorization of numbers that float32 cannot tell apart
            return f"fails ({str(error).partition(chr(10))[0]})"
        pairs = [(a, b) for a, b in zip(exact, rounded, strict=True) if isinstance(a, torch.Tensor)]
        return next((f"changes {told}" for pair in pairs if (told := _departs(*pair))), "")

    def _run(self, kind: type, given: list) -> list:
        with torch.no_grad(), undrawn():
            torch.manual_seed(0)
            return pytree.tree_leaves(kind(self._graph).run(*given))


class _InTorch(torch.fx.Interpreter):
    """Run a graph with torch's own operators."""

    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        return super().call_function(target, without_mark(target, args), kwargs)


class _InFloat32(_InTorch):
    """Run a graph with every float64 tensor rounded to float32 precision."""

    def run_node(self, n: torch.fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "output" or not (isinstance(value, torch.Tensor) and value.dtype is torch.float64):
            return value
        return value.float().double()


def _departs(right: torch.Tensor, wrong: torch.Tensor) -> str:
    """Describe the difference; "" if it is negligible."""
    if not right.numel():
        return ""
    if not right.is_floating_point():
        changed = int((right != wrong).sum())
        return f"{changed} of {right.numel()} entries of a result" if changed > TOLERANCE * right.numel() else ""
    finite = right.isfinite()
    if not bool(finite.any()):
        return ""
    largest = float(right[finite].abs().max())
    furthest = float((right[finite] - wrong[finite]).abs().nan_to_num(float("inf")).max())
    return f"a result of size {largest:.3g} by {furthest:.3g}" if furthest > TOLERANCE * largest else ""


def _as_recorded(node: torch.fx.Node, value: Any) -> Any:
    """Return a placeholder's value as a tensor of its recorded dtype on the host."""
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return value
    tensor = value.detach() if isinstance(value, torch.Tensor) else to_torch(np.asarray(value))
    return tensor.to("cpu", node.meta["val"].dtype).contiguous()


def _dtype(node: torch.fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None
