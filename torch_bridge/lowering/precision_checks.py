"""Arithmetic in float64 on a batch, where float32 keeps too few digits: `(timestamp - start).float()`.

JAX computes in float32 here. Of measurements and features it keeps seven digits, and no training tells the difference;
of a second in the year 2026 it keeps two minutes. What a graph makes of a float64 batch alone, before weights come in,
is therefore computed twice on the host, in float64 and with every result rounded to float32.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_bridge.lowering.errors import source_line
from torch_bridge.lowering.host_graph import HostPart, HostProgram, Symbols

TOLERANCE = 1e-3  # of the largest value; of the entries, where they are integers or truth values


class PrecisionChecks:
    """Those of a graph; arguments as IndexChecks has them."""

    def __init__(self, module: torch.fx.GraphModule, inputs: Sequence[str], constants: Mapping[str, Any]):
        part = HostPart(module, inputs, constants, lambda value: not value.is_complex())
        touched: set[torch.fx.Node] = set()  # what has a float64 entry of the batch in it
        self._targets: list[torch.fx.Node] = []
        for node in module.graph.nodes:
            if node.op == "placeholder":
                if node.name in part.inputs and _dtype(node) is torch.float64:
                    touched.add(node)
            elif touched & {*node.all_input_nodes} and part.has(node):
                touched.add(node)
            else:  # weights come in here, or the graph ends
                self._targets += [n for n in node.all_input_nodes if n in touched and n.op != "placeholder"]
        self._targets = [node for node in dict.fromkeys(self._targets) if _dtype(node) is not None]
        self._program = HostProgram(part, self._targets) if self._targets else None

    def loss(self, leaves: Sequence[Any], symbols: Symbols) -> str:
        """Tell where and how far the batch leads away from torch in float32; "" where it doesn't, or can't be seen."""
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
                return f"float64 values of the batch are float32 here, which changes {told}{where and f', at {where}'}"
        return ""


class _InFloat32(torch.fx.Interpreter):
    """Runs a graph with every float64 tensor rounded to what float32 holds."""

    def run_node(self, n: torch.fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "output" or not (isinstance(value, torch.Tensor) and value.dtype is torch.float64):
            return value
        return value.float().double()


def _departs(right: torch.Tensor, wrong: torch.Tensor) -> str:
    """Name the difference; "" where there is none to speak of."""
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


def _dtype(node: torch.fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None
