"""Run an exported graph on JAX arrays, operator by operator; under jax.jit the operators become one XLA program."""

import dataclasses
import functools
import logging
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
import torch
from torch.export.graph_signature import OutputKind

from jaxtrain.errors import UserError
from jaxtrain.nn import scopes
from jaxtrain.nn.remat import recompute, recomputing
from torch_bridge.datasets import to_numpy
from torch_bridge.lowering import constant_tensors, selections, wide_integers
from torch_bridge.lowering.errors import NoForm, OperatorFailed, UnsupportedModel
from torch_bridge.lowering.gradient_inputs import leading_to
from torch_bridge.lowering.index_checks import IndexChecks
from torch_bridge.lowering.nested_graphs import HIGHER_ORDER, Runner, is_array
from torch_bridge.lowering.operators import TABLE
from torch_bridge.lowering.operators.symbolic import ON_ARRAYS
from torch_bridge.lowering.precision_checks import PrecisionChecks
from torch_bridge.lowering.pullback import Pullback
from torch_bridge.lowering.sizes import Sizes
from torch_bridge.lowering.structure import Structure
from torch_bridge.lowering.table import Call

WRITES = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)  # outputs that are new values of state
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Graph:
    """One exported graph. Shapes may vary within what `sizes` admits.

    state: names of the parameters and buffers that it reads. constants: tensors outside every state dict, by
    placeholder.
    """

    module: torch.fx.GraphModule
    placeholders: tuple[tuple[str, str | None], ...]  # (placeholder, state name or None for inputs and constants)
    inputs: tuple[str, ...]
    constants: Mapping[str, Any]
    outputs: tuple[tuple[OutputKind, str | None], ...]
    structure: Structure
    spec: Any  # torch's form of the structure, with the classes of a user's outputs
    sizes: Sizes
    pullback: Pullback | None = None  # torch's own backward pass, where the code has a part in it

    def refusal(self, inputs: Sequence[Any]) -> str | None:
        """Return why the graph does not hold for these inputs of the record; None if it does."""
        return self.sizes.refusal(inputs)

    @property
    def state(self) -> set[str]:
        return {name for _, name in self.placeholders if name is not None}

    @property
    def changed(self) -> set[str]:
        """Return the names of the buffers and frozen parameters that the graph writes."""
        return {name for kind, name in self.outputs if kind in WRITES and name is not None}

    @functools.cached_property
    def counters(self) -> set[str]:
        """Return the names of the int64 buffers that the graph may let grow beyond 32 bits."""
        (output,) = (node for node in self.module.graph.nodes if node.op == "output")
        pairs = zip(self.outputs, cast(Sequence, output.args[0]), strict=True)
        written = {node: name for (kind, name), node in pairs if kind in WRITES and name}
        return wide_integers.outgrowing(self.module.graph, {p: name for p, name in self.placeholders if name}, written)

    tables = property(lambda self: constant_tensors.tables(self.constants))

    @functools.cached_property
    def _index_checks(self) -> IndexChecks:
        return IndexChecks(self.module, self.inputs, constant_tensors.on_host(self.constants))

    def check_indices(self, leaves: Sequence[Any]) -> None:
        """Raise IndexOutOfBounds if inputs in host memory lead to an index that torch would refuse."""
        self._index_checks.check(leaves, lambda: self.sizes.symbols(leaves))

    @functools.cached_property
    def _precision_checks(self) -> PrecisionChecks:
        return PrecisionChecks(self.module, self.inputs, constant_tensors.on_host(self.constants))

    def lost_digits(self, leaves: Sequence[Any]) -> str:
        """Describe where float64 inputs in host memory, computed in float32, depart from torch; "" if nowhere."""
        return self._precision_checks.loss(leaves, lambda: self.sizes.symbols(leaves))

    def lost_inside(self, leaves: Sequence[Any], state: Mapping[str, Any]) -> str:
        """Do as `lost_digits` for float64 that the graph makes of weights. state: tensors or arrays by name."""
        return self._precision_checks.loss_inside(lambda: self._arguments(state, leaves))

    def _arguments(self, state: Mapping[str, Any], inputs: Sequence[Any]) -> list[Any]:
        """Return the placeholders' values, in order."""
        values = {**constant_tensors.chosen(self.constants, state), **dict(zip(self.inputs, inputs, strict=True))}
        return [values.get(placeholder) if name is None else state[name] for placeholder, name in self.placeholders]

    def computes_as(self, other: "Graph") -> bool:
        """Return True if both have the same nodes, numbers and constants."""
        if _text(self.module) != _text(other.module) or self.constants.keys() != other.constants.keys():
            return False
        return all(np.array_equal(value, other.constants[name]) for name, value in self.constants.items())

    def differentiable(self, places: Collection[int] | None = None) -> set[str]:
        """Return names of the parameters, and placeholders of the inputs, that torch's backward() reaches.

        places: the output leaves at which it starts; all if left out.
        """
        leaves = self.output_leaves
        if self.pullback is not None:
            first = len(self.outputs) - len(leaves)
            every = self.pullback.reaches(
                [first + place for place in (range(len(leaves)) if places is None else places)]
            )
            return {name or placeholder for i, (placeholder, name) in enumerate(self.placeholders) if i in every}
        chosen = leaves if places is None else [leaves[place] for place in places]
        reached = leading_to(node for node in chosen if isinstance(node, torch.fx.Node))
        names = {node.name for node in reached if node.op == "placeholder"}
        return {name or placeholder for placeholder, name in self.placeholders if placeholder in names}

    @property
    def output_leaves(self) -> list[Any]:
        (output,) = (node for node in self.module.graph.nodes if node.op == "output")
        pairs = zip(self.outputs, cast(Sequence, output.args[0]), strict=True)
        return [node for (kind, _), node in pairs if kind in (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT)]

    def run(self, state: Mapping[str, jax.Array], inputs: Sequence[Any], call: Call) -> tuple[Any, dict[str, Any]]:
        """Return the module's output, and the new values of the buffers that it changes, by name."""
        leaves, changed = self.run_leaves(state, inputs, call)
        return self.structure.build(leaves), changed

    def run_leaves(self, state: Mapping[str, jax.Array], inputs: Sequence[Any], call: Call) -> tuple[list, dict]:
        """Do as `run`, but return the output as a flat list, for `structure.build` or `in_torch`."""
        arguments = self._arguments(state, inputs)
        narrow = {place for place, name in self.placeholders if name is not None and state[name].dtype != np.int64}
        call.bounds.update({n: wide_integers.COUNTER for n in self.module.graph.nodes if n.name in narrow})
        arguments = [wide_integers.array(value) for value in arguments]
        if self.pullback is None:
            results = run_graph(self.module, arguments, call)
        else:
            results = self.pullback.run(self.module, arguments, call, run_graph)
        pairs = list(zip(self.outputs, results, strict=True))
        written = [(name, value) for (kind, name), value in pairs if kind in WRITES and name]
        changed = {name: wide_integers.stored(value, state.get(name)) for name, value in written}
        leaves = [value for (kind, _), value in pairs if kind in (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT)]
        return leaves, changed


def _text(graph_module: torch.fx.GraphModule) -> list[str]:
    inner = [module for module in graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    return [f"{node.op} {node.name} {node.target} {node.args} {node.kwargs}" for m in inner for node in m.graph.nodes]


_LOOPS = ("lstm", "gru", "rnn_", "packed_rnn", "ctc_loss", "scan", "while_loop", "map_impl")  # in names of operators


def run_graph(graph_module: torch.fx.GraphModule, arguments: Sequence[Any], call: Call) -> list[Any]:
    """Evaluate a graph's nodes in order and return its flat list of outputs. arguments: of its placeholders."""
    values: dict[torch.fx.Node, Any] = {}
    remaining = {node: len(node.users) for node in graph_module.graph.nodes}
    feed = iter(arguments)
    for nodes in blocks(graph_module.graph) if recomputing() else ([node] for node in graph_module.graph.nodes):
        node = nodes[0]
        if node.op == "output":
            return [values[item] if isinstance(item, torch.fx.Node) else item for item in cast(Sequence, node.args[0])]
        if node.op == "placeholder":
            values[node] = next(feed)
        elif len(nodes) > 1:
            values |= _recomputed(graph_module, nodes, values, call)
        else:
            value = _value(graph_module, node, values, call)
            values[node] = value if call.observe is None else call.observe(node, value)
        for used in (used for node in nodes for used in node.all_input_nodes):
            remaining[used] -= 1
        for done in {used for node in nodes for used in (node, *node.all_input_nodes)}:
            if not remaining[done]:
                values.pop(done, None)
    raise AssertionError("a graph ends with its output")


def _value(graph_module, node: torch.fx.Node, values: Mapping[torch.fx.Node, Any], call: Call) -> Any:
    if node.op == "get_attr":
        return _attribute(graph_module, str(node.target))
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    call.draw = (node.meta.get("custom") or {}).get("draw")
    name = _module_of(node)
    if not name:
        return _evaluate(node, args, kwargs, call)
    with scopes.scope(name):
        return _evaluate(node, args, kwargs, call)


def _module_of(node: torch.fx.Node) -> str:
    """Return the path of the submodule that a node comes from; for the root module, or a loss module, its class."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack or isinstance(node.target, torch._ops.HigherOrderOperator):
        return ""
    path, kind = stack[-1]
    kind = kind if isinstance(kind, str) else kind.__qualname__
    return path.removeprefix("wrapped_module").removeprefix(".") or kind.rpartition(".")[2]


def _recomputed(graph_module, nodes: Sequence[torch.fx.Node], values: Mapping, call: Call) -> dict[torch.fx.Node, Any]:
    """Return a block's values that later nodes need; the backward pass recomputes them. Sizes stay Python numbers."""
    inside = set(nodes)
    given = {used: values[used] for node in nodes for used in node.all_input_nodes if used not in inside}
    entering = [node for node, value in given.items() if is_array(value)]
    leaving = [node for node in nodes if any(user not in inside for user in node.users)]
    plain: dict[torch.fx.Node, Any] = {}

    def run(arrays):
        local = given | dict(zip(entering, arrays, strict=True))
        for node in nodes:
            local[node] = _value(graph_module, node, local, call)
        plain.update({node: local[node] for node in leaving if not is_array(local[node])})
        return [local[node] for node in leaving if node not in plain]

    arrays = recompute(run, [given[node] for node in entering])
    return plain | dict(zip([node for node in leaving if node not in plain], arrays, strict=True))


def blocks(graph: torch.fx.Graph) -> Iterator[list[torch.fx.Node]]:
    """Yield the nodes in order, those of one block of the model together. A block is an element of a ModuleList or
    Sequential, the innermost such, that is more than a single layer of torch.nn."""
    kept: list[torch.fx.Node] = []
    current = None
    for node in graph.nodes:
        picks = node.target is operator.getitem and node.args[0] in kept
        found = current if picks else _block_of(node)
        if found is None or found != current:
            if kept:
                yield kept
            kept, current = [], found
        if found is None:
            yield [node]
        else:
            kept.append(node)


def _block_of(node: torch.fx.Node) -> str | None:
    if node.op != "call_function":
        return None
    for path, kind in reversed(list((node.meta.get("nn_module_stack") or {}).values())):
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
        layer = name.startswith("torch.nn.modules.") and ".transformer." not in name
        if path.rpartition(".")[2].isdigit() and not layer:
            return path
    return None


def _attribute(graph_module, target: str) -> Any:
    value = graph_module
    for part in target.split("."):
        value = getattr(value, part)
    return wide_integers.array(to_numpy(value)) if isinstance(value, torch.Tensor) else value


def _evaluate(node: torch.fx.Node, args: tuple, kwargs: Mapping[str, Any], call: Call) -> Any:
    target: Any = node.target
    if isinstance(target, torch._ops.HigherOrderOperator) or str(target) in HIGHER_ORDER:
        return HIGHER_ORDER[str(target)](Runner(run_graph, call, node), *args, **kwargs)
    if isinstance(target, torch._ops.OpOverload):
        lower = cast(Callable, TABLE.get(str(target)))  # None for some that select by values
        plain = lambda args, kwargs: wide_integers.evaluate(lower, call, node, args, kwargs)
        try:
            if selections.concern(node, (args, kwargs)):
                return selections.compute(node, args, kwargs, plain)
            return plain(args, kwargs)
        except (UserError, UnsupportedModel, jax.errors.JaxRuntimeError, FloatingPointError):
            raise
        except NotImplementedError as error:
            raise NoForm(error, node.stack_trace) from error
        except Exception as error:  # whatever JAX or a lowering raises for shapes and dtypes that it cannot take
            raise OperatorFailed(str(target), node.stack_trace, error) from error
    if selections.concern(node, (args, kwargs)):
        return selections.compute(node, args, kwargs, target)
    on_arrays = ON_ARRAYS.get(target) if any(map(is_array, args)) else None  # numbers read by item()
    return (on_arrays or target)(*args, **kwargs)  # arithmetic on sizes, picking from a tuple
