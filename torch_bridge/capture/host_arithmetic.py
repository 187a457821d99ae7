"""Arithmetic on Python numbers inside an ATen graph, moved out of it: Python computes it before each call."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

_ITEM = torch.ops.aten._local_scalar_dense.default
_ARITHMETIC = {operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pow, torch.sym_float}
_SHAPED_BY_SCALARS = ("aten.arange.", "aten.range.")


class HostArithmetic:
    """Arithmetic of a graph on numbers alone. Afterwards the results are placeholders at the end of its inputs.

    Dynamo passes a float that changes between calls as a float64 tensor without axes, of which the graph takes item().
    numbers: positions of the inputs that are numbers. is_size: for each of them, whether it is a size, an axis or
    another argument that XLA must know while it compiles. computed: count of the results.
    """

    def __init__(self, module: torch.fx.GraphModule):
        graph = module.graph
        nodes = list(graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        known = {node for node in inputs if not isinstance(node.meta.get("val"), torch.Tensor)}
        for node in nodes:
            if _reads_number(node, inputs) or (
                _is_python(node) and all(used in known for used in node.all_input_nodes)
            ):
                known.add(node)
        results = [node for node in nodes if node in known and node.op != "placeholder" and node.users.keys() - known]
        self._program = _program(inputs, [node for node in nodes if node in known], results)
        self.computed = len(results)
        last = inputs[-1] if inputs else None
        for number, node in enumerate(results):
            with graph.inserting_after(last) if last is not None else graph.inserting_before(nodes[0]):
                last = graph.placeholder(f"computed_{number}")
            last.meta = {"val": node.meta.get("val")}
            node.replace_all_uses_with(last, delete_user_cb=lambda user: user not in known)
        for node in reversed(nodes):
            if node in known and node.op != "placeholder":
                graph.erase_node(node)
        module.recompile()
        every = [node for node in graph.nodes if node.op == "placeholder"]
        self.numbers = [i for i, node in enumerate(every) if not isinstance(node.meta.get("val"), torch.Tensor)]
        self.is_size = {i: any(_as_size(user, every[i]) for user in every[i].users) for i in self.numbers}

    def freeze(self) -> bool:
        """Make every number one that XLA must know while it compiles. Return False if all were already."""
        changed = not all(self.is_size.values())
        self.is_size = dict.fromkeys(self.is_size, True)
        return changed

    def compute(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the results for these inputs of the original graph."""
        return self._program(*inputs)


def _reads_number(node: torch.fx.Node, inputs: Sequence[torch.fx.Node]) -> bool:
    return node.target is _ITEM and node.args[0] in inputs and node.args[0].meta["val"].dtype is torch.float64


def _is_python(node: torch.fx.Node) -> bool:
    """Return True for an operator of Python's on numbers, with at least one that changes."""
    torchs = isinstance(node.target, torch._ops.OpOverload | torch._ops.HigherOrderOperator)
    plain = node.op == "call_function" and not torchs and node.target is not operator.getitem
    return plain and bool(node.all_input_nodes)


def _program(inputs: Sequence[torch.fx.Node], known: Sequence[torch.fx.Node], results: Sequence[torch.fx.Node]):
    graph, copies = torch.fx.Graph(), {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
    for node in known:
        if node.target is _ITEM:
            copies[node] = graph.call_function(torch.Tensor.item, (copies[node.args[0]],))
        elif node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[node] for node in results])
    graph.eliminate_dead_code()
    return torch.fx.GraphModule({}, graph)


def _as_size(user: torch.fx.Node, node: torch.fx.Node) -> bool:
    """Return True if the user must know the number while it is compiled."""
    if user.op == "output":
        return False
    if user.target in _ARITHMETIC:  # with a number of the program: a value read by item()
        return any(_as_size(further, user) for further in user.users)
    if not isinstance(user.target, torch._ops.OpOverload):
        return True
    if str(user.target).startswith(_SHAPED_BY_SCALARS):
        return True
    kinds = {argument.name: str(argument.type).lower() for argument in user.target._schema.arguments}
    pairs = [*zip(kinds.values(), user.args, strict=False), *((kinds.get(k, "int"), v) for k, v in user.kwargs.items())]
    holds = lambda value: any(leaf is node for leaf in pytree.tree_leaves(value, is_leaf=_is_node))
    free = ("number", "scalar", "tensor", "float")
    return any(holds(value) and not any(word in kind for word in free) for kind, value in pairs)


def _is_node(value: Any) -> bool:
    return isinstance(value, torch.fx.Node)
