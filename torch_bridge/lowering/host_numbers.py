"""Compute on the host what Python computes of changing numbers alone, such as `1 - 0.999 ** self.steps`.

A record has such numbers as 0-d tensors, and Python's arithmetic as operators on them, in JAX's 32 bits. They are taken
out of the graph and computed as Python computes them, in double precision and with integers of any size; the results
are inputs of the graph where they meet a tensor, rounded once.
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from torch_bridge.lowering.errors import CannotRecord, WideIntegers
from torch_bridge.lowering.python.answers import Conditions
from torch_bridge.lowering.python.changing import ChangingNumber, values_of
from torch_bridge.lowering.recording.sizes import category

_OPERATORS: dict[str, Callable] = {
    "add": operator.add,
    "sub": operator.sub,
    "rsub": lambda a, b: b - a,
    "mul": operator.mul,
    "div": operator.truediv,
    "floor_divide": operator.floordiv,
    "remainder": operator.mod,
    "pow": operator.pow,
    "reciprocal": lambda a: 1 / a,
    "neg": operator.neg,
    "abs": abs,
}


@dataclasses.dataclass(frozen=True)
class _Of:
    """Result of an operator, or a given number, by the name of its node."""

    name: str


@dataclasses.dataclass(frozen=True)
class HostNumbers:
    """Python's own arithmetic on the changing numbers among a record's inputs, before its graph runs.

    numbers: (position, type, name) of each. operators: (name of the result, operator, arguments). results: names and
    dtypes of the values that the graph takes instead of the numbers, after its other inputs. conditions: what Python
    has asked of the numbers.
    """

    numbers: tuple[tuple[int, type, str], ...] = ()
    operators: tuple[tuple[str, str, tuple], ...] = ()
    results: tuple[tuple[str, np.dtype], ...] = ()
    conditions: tuple[Conditions, ...] = ()

    def refusal(self, inputs: Sequence[Any]) -> str | None:
        """Return why these inputs do not fit; None if the same of them are numbers of the same types, which answer
        Python alike."""
        given = {place: type(value) for place, value in values_of(inputs).items()}
        if given != {place: kind for place, kind, _ in self.numbers}:
            return "other numbers of it have changed"
        return None if self.answers(inputs) else "Python gets other answers of the numbers that change"

    def answers(self, inputs: Sequence[Any]) -> bool:
        """Return True if these inputs, of the record's types, answer what Python has asked as the recorded ones did."""
        if not self.conditions:
            return True
        values = values_of(inputs)
        return all(conditions.hold(values) for conditions in self.conditions)

    def asked(self) -> set[int]:
        """Return the positions of the numbers that Python has asked something of."""
        return {place for conditions in self.conditions for place in conditions.given}

    def values(self, inputs: Sequence[Any]) -> dict[str, Any]:
        """Return what Python computes of a record's inputs, by name.

        Raises CannotRecord where Python raises an ArithmeticError, which the code may catch.
        """
        values: dict[str, Any] = {name: inputs[place].value for place, _, name in self.numbers}
        try:
            for name, kind, arguments in self.operators:
                values[name] = _OPERATORS[kind](*(values[x.name] if isinstance(x, _Of) else x for x in arguments))
        except ArithmeticError as error:
            raise CannotRecord(f"Python raises {type(error).__name__}: {error}") from error
        return values

    def given(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the graph's inputs for a record's.

        Raises CannotRecord as `values` does, and for a result that is no number of the recorded type.
        """
        values = self.values(inputs)
        others = [x for x in inputs if not isinstance(x, ChangingNumber)]
        return [*others, *(_array(values[name], dtype) for name, dtype in self.results)]

    def unread(self) -> set[int]:
        """Return the positions of the numbers that neither Python nor the graph uses."""
        used = {x.name for _, _, arguments in self.operators for x in arguments if isinstance(x, _Of)}
        used |= {name for name, _ in self.results}
        return {place for place, _, name in self.numbers if name not in used} - self.asked()


def on_host(graph: Any, inputs: Sequence[Any], conditions: Sequence[Conditions]) -> Any:
    """Return a Graph that leaves to the host what Python computes of changing numbers. inputs: those recorded with.
    conditions: what Python has asked of them."""
    numbers = {graph.inputs[place]: place for place in values_of(inputs)}
    if not numbers:
        return graph
    module, operators, results = _split(graph.module, numbers)
    kept = [place for place, name in enumerate(graph.inputs) if name not in numbers]
    sizes = [graph.sizes.inputs[place] for place in kept] + [(category(dtype), ()) for _, dtype in results]
    names = [name for name, _ in results]
    return dataclasses.replace(
        graph,
        module=module,
        placeholders=(*(p for p in graph.placeholders if p[0] not in numbers), *((name, None) for name in names)),
        inputs=(*(graph.inputs[place] for place in kept), *names),
        sizes=dataclasses.replace(graph.sizes, inputs=tuple(sizes)),
        host=HostNumbers(
            tuple((place, type(inputs[place].value), name) for name, place in numbers.items()),
            operators,
            results,
            tuple(conditions),
        ),
    )


def _split(module: torch.fx.GraphModule, numbers: dict[str, int]) -> tuple[torch.fx.GraphModule, tuple, tuple]:
    """Return the graph without what Python computes of these placeholders, the operators, and their results, which are
    its last inputs."""
    nodes = list(module.graph.nodes)
    apart = {node for node in nodes if node.op == "placeholder" and node.name in numbers}
    operators = []
    for node in nodes:
        if node not in apart and (kind := _python_operator(node, apart)):
            apart.add(node)
            operators.append((node, kind))
    results = {node: _dtype(node, apart) for node in nodes if node in apart and node.users.keys() - apart}
    needed = _leading_to(results)
    listed = tuple(
        (node.name, kind, tuple(_Of(x.name) if isinstance(x, torch.fx.Node) else x for x in node.args))
        for node, kind in operators
        if node in needed
    )
    return _without(module, apart, results), listed, tuple((node.name, dtype) for node, dtype in results.items())


def _python_operator(node: torch.fx.Node, known: set[torch.fx.Node]) -> str:
    """Return the name of the operator that a node applies to known numbers and to constants; "" for other nodes."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return ""
    name = str(node.target).split(".")[1]
    if name == "div" and node.kwargs == {"rounding_mode": "floor"}:
        name = "floor_divide"
    elif node.kwargs:
        return ""
    plain = all(x in known if isinstance(x, torch.fx.Node) else isinstance(x, (bool, int, float)) for x in node.args)
    return name if plain and name in _OPERATORS and node.all_input_nodes and len(node.args) < 3 else ""


def _leading_to(nodes: Any) -> set[torch.fx.Node]:
    found, waiting = set(nodes), list(nodes)
    while waiting:
        new = set(waiting.pop().all_input_nodes) - found
        found |= new
        waiting += new
    return found


def _dtype(node: torch.fx.Node, apart: set[torch.fx.Node]) -> np.dtype:
    """Return float32 for a result that is a float, or an integer of any size that only meets floats in arithmetic."""
    users = node.users.keys() - apart
    real = node.meta["val"].is_floating_point() or all(map(_meets_floats, users))
    return np.dtype(np.float32 if real else np.int64)


def _meets_floats(user: torch.fx.Node) -> bool:
    name = str(user.target).split(".")[1] if isinstance(user.target, torch._ops.OpOverload) else ""
    dtypes = [getattr(used.meta.get("val"), "dtype", None) for used in user.all_input_nodes]
    return name in ("add", "sub", "mul", "div") and any(
        dtype is not None and dtype.is_floating_point for dtype in dtypes
    )


def _without(
    module: torch.fx.GraphModule, apart: set[torch.fx.Node], results: dict[torch.fx.Node, np.dtype]
) -> torch.fx.GraphModule:
    """Return a copy of the graph that takes these results as inputs, in place of what is apart."""
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    nodes = [node for node in module.graph.nodes if node not in apart]
    for node in nodes:
        if node.op == "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    for node, dtype in results.items():
        copies[node] = graph.placeholder(node.name)
        kind = torch.float32 if dtype == np.float32 else torch.int64
        copies[node].meta["val"] = node.meta["val"].new_empty((), dtype=kind)
    for node in nodes:
        if node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return torch.fx.GraphModule(module, graph)


def _array(value: Any, dtype: np.dtype) -> np.ndarray:
    real = isinstance(value, (float, np.floating))
    if not isinstance(value, (int, float, np.number)) or (real and dtype != np.float32):
        raise CannotRecord(f"Python computes {value!r} of a number that changes, where the record has another type")
    if dtype == np.int64 and not -(2**31) <= value < 2**31:
        raise WideIntegers(f"Python computes an integer ({value}) that does not fit into 32 bits, which JAX counts in")
    return np.asarray(value, dtype)
