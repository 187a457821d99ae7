"""Arithmetic in float64 on a batch, where float32 keeps too few digits: `(timestamp - start).float()`.

JAX computes in float32 here. Of measurements and features it keeps seven digits, and no training tells the difference;
of a second in the year 2026 it keeps two minutes. What a graph makes in float64 of the batch and of constants alone,
before weights come in, is therefore computed twice on the host, in float64 and with every result rounded to float32; so
is the whole graph where weights come into float64, as in `cholesky(kernel.double() + 1e-8 * eye)`.
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

TOLERANCE = 1e-3  # of the largest value; of the entries, where they are integers or truth values
MOST_ELEMENTS = 10**8  # of weights and batch together, with which a graph is run twice on the host

log = logging.getLogger(__name__)


class PrecisionChecks:
    """Those of a graph; arguments as IndexChecks has them."""

    def __init__(self, module: torch.fx.GraphModule, inputs: Sequence[str], constants: Mapping[str, Any]):
        part = HostPart(module, inputs, constants, lambda value: not value.is_complex())
        touched: set[torch.fx.Node] = set()  # what has float64 in it
        self._graph = module
        self._of_weights: list[torch.fx.Node] = []  # float64 that weights come into
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
                return f"float64 values are float32 here, which changes {told}{where and f', at {where}'}"
        return ""

    def loss_inside(self, arguments: Callable[[], Sequence[Any] | None]) -> str:
        """As `loss`, of float64 that the graph makes of its weights. arguments: gives the placeholders' values, as
        arrays in host memory or tensors; None where they cannot be had."""
        values = arguments() if self._of_weights else None
        if values is None or sum(math.prod(getattr(value, "shape", ())) for value in values) > MOST_ELEMENTS:
            return ""
        nodes = [node for node in self._graph.graph.nodes if node.op == "placeholder"]
        given = [_as_recorded(node, value) for node, value in zip(nodes, values, strict=True)]
        try:
            exact = self._run(_InTorch, given)
        except Exception as error:  # an operator of a record's own, which torch does not run
            log.info("float64 inside a graph is not looked at: %s", error)
            return ""
        told = self._departs_rounded(exact, given)
        where = told and source_line(getattr(self._of_weights[0], "stack_trace", None) or "", own=True)
        return told and f"float64 is float32 here, which {told}{where and f', from {where} on'}"

    def _departs_rounded(self, exact: list, given: list) -> str:
        try:
            rounded = self._run(_InFloat32, given)
        except Exception as error:  # a factorization, say, of what float32 no longer tells apart
            return f"fails ({str(error).partition(chr(10))[0]})"
        pairs = [(a, b) for a, b in zip(exact, rounded, strict=True) if isinstance(a, torch.Tensor)]
        return next((f"changes {told}" for pair in pairs if (told := _departs(*pair))), "")

    def _run(self, kind: type, given: list) -> list:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return pytree.tree_leaves(kind(self._graph).run(*given))


class _InTorch(torch.fx.Interpreter):
    """Runs a graph by torch's own operators."""

    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        return super().call_function(target, without_mark(target, args), kwargs)


class _InFloat32(_InTorch):
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


def _as_recorded(node: torch.fx.Node, value: Any) -> Any:
    """A placeholder's value as a tensor of its recorded dtype on the host."""
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return value
    tensor = value.detach() if isinstance(value, torch.Tensor) else to_torch(np.asarray(value))
    return tensor.to("cpu", node.meta["val"].dtype).contiguous()


def _dtype(node: torch.fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None
