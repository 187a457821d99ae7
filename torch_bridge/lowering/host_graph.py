"""Compute the part of a graph that depends on a batch alone with torch's own operators, on the host."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch

from torch_bridge.datasets import to_torch

Symbols = Callable[[], Mapping[Any, int]]  # returns the values of a graph's symbolic sizes
_RANDOM = ("rand", "bernoulli", "multinomial", "normal", "uniform", "poisson", "dropout", "exponential")


class HostPart:
    """Nodes that depend only on sizes, the batch and constants, through tensors that `admits` accepts.

    inputs: the graph's placeholders, in the order of the batch's leaves. constants: values of other placeholders.
    """

    def __init__(
        self,
        module: torch.fx.GraphModule,
        inputs: Sequence[str],
        constants: Mapping[str, Any],
        admits: Callable[[torch.Tensor], bool],
    ):
        self.module, self.inputs, self.constants, self._admits = module, tuple(inputs), constants, admits
        self._given = {*inputs, *(name for name, value in constants.items() if isinstance(value, np.ndarray))}
        self._known: dict[torch.fx.Node, bool] = {}

    def has(self, node: torch.fx.Node) -> bool:
        """Return True if the node belongs to this part."""
        if node not in self._known:
            self._known[node] = False
            value = node.meta.get("val")
            if is_size(node):
                self._known[node] = True
            elif not isinstance(value, torch.Tensor):
                self._known[node] = isinstance(value, (list, tuple)) and self._all_follow(node)
            elif self._admits(value):
                given = node.name in self._given
                self._known[node] = given if node.op == "placeholder" else self._all_follow(node)
        return self._known[node]

    def _all_follow(self, node: torch.fx.Node) -> bool:
        return node.op == "call_function" and _is_plain(node.target) and all(map(self.has, node.all_input_nodes))


class HostProgram:
    """Program that computes nodes of a HostPart. module: takes `arguments` and returns the nodes' values."""

    def __init__(self, part: HostPart, targets: Iterable[torch.fx.Node]):
        self._part, self._targets = part, list(targets)
        wanted: set[torch.fx.Node] = set()
        waiting = [*self._targets]
        while waiting:
            node = waiting.pop()
            if node not in wanted:
                wanted.add(node)
                waiting += [] if is_size(node) else node.all_input_nodes
        graph, copies = torch.fx.Graph(), {}
        self._needed = [n for n in part.module.graph.nodes if n in wanted and (n.op == "placeholder" or is_size(n))]
        for node in self._needed:
            copies[node] = graph.placeholder(node.name)
        for node in part.module.graph.nodes:
            if node in wanted and node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
                copies[node].args = without_mark(node.target, copies[node].args)
        graph.output([copies[node] for node in self._targets])
        self.module = torch.fx.GraphModule({}, graph)

    def arguments(self, leaves: Sequence[Any], symbols: Symbols) -> list | None:
        """Return the module's arguments; None if some lie on a device. leaves: arrays in host memory or tensors."""
        by_name = dict(zip(self._part.inputs, leaves, strict=True))
        values = [
            number(node.meta["val"], symbols)
            if is_size(node)
            else _tensor(by_name.get(node.name, self._part.constants.get(node.name)))
            for node in self._needed
        ]
        return None if any(value is None for value in values) else values


def without_mark(target: Any, arguments: tuple) -> tuple:
    """Return an operator's arguments as torch takes them, without the mark that records add to `detach`."""
    return arguments[:1] if target is torch.ops.aten.detach.default else arguments


def is_size(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def number(size: Any, symbols: Symbols) -> int | None:
    """Return a size as an int, with its symbols replaced by numbers; None if it depends on values."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    found = size.node.expr.subs(symbols())
    return int(found) if found.is_number else None


def _is_plain(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return target in (operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv)
    return target.namespace in ("aten", "prims") and not any(word in target.name() for word in _RANDOM)


def _tensor(value: Any) -> Any:
    """Return a leaf as torch's operators take it; None if it lies on a device."""
    if isinstance(value, jax.Array) and jax.default_backend() == "cpu":
        value = np.asarray(value)
    if isinstance(value, jax.Array) or (isinstance(value, torch.Tensor) and not value.is_cpu):
        return None
    if isinstance(value, np.generic):
        value = np.array(value)
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value) if value.dtype.kind in "biuf" and value.flags.writeable else to_torch(value)
    if isinstance(value, torch.Tensor):
        value = value.contiguous()  # the graph's views were recorded on contiguous examples
        return value.long() if value.dtype is torch.int32 else value
    return value
