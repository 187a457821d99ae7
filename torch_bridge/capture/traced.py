"""A functional graph of ATen operators, made of Dynamo's graph, as a Graph that JAX runs and differentiates."""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Collection, Sequence
from typing import Any, cast

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.graph_signature import OutputKind

from torch_bridge.capture import artefacts, decompositions, torch_api
from torch_bridge.capture.aten_program import output_of
from torch_bridge.capture.attention import formula_if_twice, one_operator
from torch_bridge.capture.compiled_graph import refusal
from torch_bridge.capture.cuts import CuttingReplay, OwnBackward, check
from torch_bridge.capture.module_hooks import has_module_hooks
from torch_bridge.capture.own_backward import (
    AsInputs,
    OneMoreInput,
    halves,
    hooked,
    open_slopes,
    placeholders,
    slope_of,
)
from torch_bridge.capture.replay import Replay, writes
from torch_bridge.capture.user_warnings import showing
from torch_bridge.datasets import is_dense, kind_of
from torch_bridge.lowering import constant_tensors, unregistered
from torch_bridge.lowering.dtypes import category, jax_dtype
from torch_bridge.lowering.errors import (
    ADVICE_WRITTEN,
    CannotRecord,
    Obstacle,
    Unfollowed,
    UnsupportedModel,
    module_path,
    source_line,
)
from torch_bridge.lowering.gradient_inputs import leading_to
from torch_bridge.lowering.interpreter import Graph
from torch_bridge.lowering.outside_writes import WRITES
from torch_bridge.lowering.sizes import Sizes
from torch_bridge.lowering.structure import Structure

log = logging.getLogger(__name__)


@dataclasses.dataclass
class State:
    """The tensors of a module, `entry`, by identity. names: of parameters and buffers that a graph takes from its
    caller; written: further ones that it takes if it writes them. trained: ids of parameters with a gradient."""

    entry: torch.nn.Module
    names: dict[int, str]
    written: dict[int, str]
    trained: set[int]


@dataclasses.dataclass(frozen=True)
class Result:
    """An output of the call: this result of the graph."""

    place: int


@dataclasses.dataclass
class Traced:
    """A functional graph. Its outputs are the new values of the inputs that it writes, its results, and gradients of
    inputs if it has torch's backward pass.

    reals: of each input, the tensor that it was captured with; None for a size. kinds: of each result, torch.Tensor or
    int. written: positions of the inputs that it writes. ends: positions of the results that the gradients start at;
    None without torch's backward pass. gradients: positions of the inputs that they belong to. closed: positions of the
    arguments of the module that have no gradient.
    """

    module: torch.fx.GraphModule
    reals: list[Any]
    kinds: list[type]
    written: list[int]
    ends: list[int] | None = None
    gradients: list[int] = dataclasses.field(default_factory=list)
    closed: list[int] = dataclasses.field(default_factory=list)
    _slopes: set[str] = dataclasses.field(default_factory=set)  # names of placeholders
    _hooks: dict[int, list] = dataclasses.field(default_factory=dict)  # of inputs, on their gradients

    @classmethod
    def of(
        cls, gm: torch.fx.GraphModule, fakes: Sequence[Any], leaves: Sequence[Any], entry: torch.nn.Module
    ) -> "Traced":
        """Trace Dynamo's graph; with torch's backward pass, if the code has a part in that."""
        reals, owner = torch_api.real_inputs(gm), getattr(entry, "wrapped_module", entry)
        for place, (fake, real) in enumerate(zip(fakes, reals, strict=True)):
            if isinstance(fake, torch.SymInt):
                reals[place] = None
            elif not isinstance(real, torch.Tensor):
                raise Unfollowed(f"it computes with {type(real).__name__}, which Python may change")
        try:
            check(gm, [real for real in reals if real is not None])
            return cls._traced(gm, fakes, reals, leaves, owner)
        except OwnBackward as error:
            log.info("the graph has torch's backward pass: %s", error)
        tensors = {id(tensor): tensor for tensor in (*entry.parameters(), *entry.buffers())}
        while True:
            try:
                return cls._traced(gm, fakes, reals, leaves, owner, tensors)
            except OneMoreInput as more:  # that only a hook reads
                reals, fakes = [*reals, tensors[more.number]], [*fakes, tensors[more.number]]

    @classmethod
    def _traced(
        cls,
        gm: torch.fx.GraphModule,
        fakes: Sequence[Any],
        reals: list,
        leaves: Sequence[Any],
        owner: torch.nn.Module,
        tensors: dict[int, torch.Tensor] | None = None,
    ) -> "Traced":
        """owner: the user's module. tensors: its own, by id, if the graph has torch's backward pass, too."""
        traced, own, count = cls(gm, reals, [], []), tensors is not None, len(placeholders(gm))
        inner = leaves if not has_module_hooks(gm) else ()  # hooks get None where no input asks for a gradient
        graded = [place for place, real in enumerate(reals) if _may_have_gradient(real, inner)]
        traced.closed = [place for place, real in enumerate(reals) if any(real is leaf for leaf in leaves)]
        traced.closed = [place for place in traced.closed if place not in graded]

        overwritten = [
            place
            for place, node in enumerate(placeholders(gm))
            if place in graded and any(reals[place] is leaf for leaf in leaves) and _is_written(node)
        ]
        hooks = {place: real._backward_hooks for place, real in enumerate(reals) if isinstance(real, torch.Tensor)}
        traced._hooks = {place: list(each.values()) for place, each in hooks.items() if each}

        modes: list[Any] = [None]

        def step(*arguments: Any) -> list:
            inputs = list(arguments)
            for place in graded:
                inputs[place] = inputs[place].detach().requires_grad_()
            leaves = {place: inputs[place] for place in graded}
            for place in overwritten:  # as torch allows for a batch that asks for no gradient
                inputs[place] = inputs[place].clone()
            exchanging = contextlib.nullcontext() if tensors is None else AsInputs(tensors, reals, inputs)
            with torch.enable_grad(), torch.fx.traceback.preserve_node_meta(), exchanging:
                results = list((Replay if own else CuttingReplay)(gm, modes[0], warns=True).run(*inputs[:count]))
                for result in results:
                    if not isinstance(result, torch.Tensor | torch.SymInt):
                        raise Unfollowed(f"it returns {type(result).__name__}")
                gradients = traced._gradients(results, leaves) if own else []
            traced.kinds = [int if isinstance(result, torch.SymInt) else torch.Tensor for result in results]
            return [value.detach() if isinstance(value, torch.Tensor) else value for value in (*results, *gradients)]

        def trace() -> tuple[torch.fx.GraphModule, list[int]]:
            with formula_if_twice(gm), one_operator() as modes[0]:
                rules = decompositions.rules_with_factors() if own else decompositions.rules()
                return torch_api.functional_graph(step, fakes, rules)

        traced.module, traced.written = showing(trace, gm, fakes[:count], owner)
        _explicit_cuts(traced.module)
        traced._slopes = open_slopes(traced.module)
        _drop_checks(traced.module)
        decompositions.check(traced.module)
        if why := refusal(traced.module):
            raise CannotRecord(why)
        artefacts.show_graph("a module's graph", traced.module)
        return traced

    def _gradients(self, results: list, inputs: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """Return torch's gradients of the inputs, by position, for slopes of the results that come later."""
        ends = {n: y for n, y in enumerate(results) if isinstance(y, torch.Tensor) and y.requires_grad}
        self.ends = list(ends)
        slopes = [slope_of(y.detach()) for y in ends.values()]
        found = torch_api.slopes_of(list(ends.values()), slopes, list(inputs.values()))
        gradients = {place: grad for place, grad in zip(inputs, found, strict=True) if grad is not None}
        self.gradients = list(gradients)
        return [hooked(self._hooks.get(place, ()), grad) for place, grad in gradients.items()]

    def marked(self, marks: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Return each mark with the value, without numbers, of its result."""
        results: Any = output_of(self.module).args[0]
        return [(mark, node.meta["val"]) for mark, node in zip(marks, results[len(self.written) :], strict=False)]

    def finished(
        self, outputs: list, spec: Any, leaves: Sequence[Any], state: State, assigned: dict[int, Any]
    ) -> tuple[Graph, dict]:
        """Return the Graph with these outputs, and the outside tensors that it holds. assigned: the new
        values of buffers, Results or tensors, by the id of the old one."""
        graph = self.module.graph
        nodes = placeholders(self.module)[: len(self.reals)]
        of_leaf = self._leaf_nodes(nodes, leaves)
        names, constants, outside = self._tensors(nodes, {*of_leaf.values()}, state, assigned)
        constants |= {of_leaf[i].name: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
        results = list(cast(Sequence, output_of(self.module).args[0]))
        first = len(self.written)
        new_values = []
        for place, result in zip(self.written, results, strict=False):
            if id(self.reals[place]) in state.trained:
                raise _written_parameter(state, self.reals[place], result)
            if nodes[place] in names and id(self.reals[place]) not in assigned:
                new_values.append((result, names[nodes[place]]))
        by_tensor = {id(real): node for node, real in zip(nodes, self.reals, strict=True) if real is not None}
        by_tensor |= {id(leaf): of_leaf[place] for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        by_tensor |= {id(self.reals[place]): result for place, result in zip(self.written, results, strict=False)}
        for buffer, value in assigned.items():
            node = results[first + value.place] if isinstance(value, Result) else by_tensor.get(id(value))
            if node is None:
                raise Unfollowed("it assigns a buffer to another one that it does not read")
            new_values.append((node, state.names.get(buffer) or state.written[buffer]))
        returned: list[Any] = []
        for output in outputs:
            if isinstance(output, Result):
                returned.append(results[first + output.place])
            elif isinstance(output, torch.Tensor) and id(output) not in by_tensor:
                raise Unfollowed("it returns a tensor from outside the module")
            else:
                returned.append(by_tensor[id(output)] if isinstance(output, torch.Tensor) else output)
        self._check_trained(state.entry, nodes, outside, returned)
        last, first = first + len(self.kinds), len(new_values)
        output_of(self.module).args = ([*(node for node, _ in new_values), *returned, *results[last:]],)
        self._replace_sizes([node for node, real in zip(nodes, self.reals, strict=True) if real is None])
        graph.eliminate_dead_code()
        module, pullback = self.module, None
        if self.ends is not None:
            inside = [output.place if isinstance(output, Result) else None for output in outputs]
            ends = [[first + n for n, place in enumerate(inside) if place == end] for end in self.ends]
            closed = [nodes[place].name for place in self.closed]
            of = [nodes[place].name for place in self.gradients]
            module, pullback = halves(self.module, self._slopes, first + len(returned), ends, of, closed)
        module.recompile()
        state_names = {node.name: name for node, name in names.items()}
        made = Graph(
            module=module,
            placeholders=tuple((n.name, state_names.get(n.name)) for n in module.graph.nodes if n.op == "placeholder"),
            inputs=tuple(of_leaf[place].name for place in range(len(leaves))),
            constants=constants,
            outputs=(
                *((OutputKind.BUFFER_MUTATION, name) for _, name in new_values),
                *((OutputKind.USER_OUTPUT, None) for _ in returned),
            ),
            structure=Structure.of(spec),
            spec=spec,
            sizes=_sizes([of_leaf[place].meta["val"] for place in range(len(leaves))]),
            pullback=pullback,
        )
        return made, outside

    def _leaf_nodes(self, nodes: Sequence[torch.fx.Node], leaves: Sequence[Any]) -> dict[int, torch.fx.Node]:
        """Return the placeholder of each leaf of the inputs; new ones for those that the graph does not read."""
        of_real = {id(real): node for node, real in zip(nodes, self.reals, strict=True) if real is not None}
        found = {}
        for place, leaf in enumerate(leaves):
            known = of_real.get(id(leaf)) if isinstance(leaf, torch.Tensor) else None
            if known is None:
                with self.module.graph.inserting_before(next(iter(self.module.graph.nodes))):
                    known = self.module.graph.placeholder(f"unread_{place}")
                known.meta["val"] = leaf
            found[place] = known
        return found

    def _tensors(
        self, nodes: Sequence[torch.fx.Node], inputs: set, state: State, assigned: Collection[int]
    ) -> tuple[dict, dict, dict]:
        """Return the names of the placeholders that are state, the values of those that are constants, by name, and the
        outside tensors that these are, by id."""
        names, constants, outside = {}, {}, {}
        for place, (node, real) in enumerate(zip(nodes, self.reals, strict=True)):
            if real is None or node in inputs:
                continue
            if not is_dense(real):
                what = f"{_name_in(state.entry, real)} is a {kind_of(real)} tensor"
                raise CannotRecord(f"{what}, and compiled programs take dense ones: to_dense()")
            writes = place in self.written or id(real) in assigned
            name = state.names.get(id(real)) or (state.written.get(id(real)) if writes else None)
            if name is not None:
                names[node] = name
            elif place in self.written:
                raise CannotRecord(WRITES)
            else:
                constants[node.name], outside[id(real)] = constant_tensors.copied(real), real
        return names, constants, outside

    def _check_trained(
        self, entry: torch.nn.Module, nodes: Sequence[torch.fx.Node], outside: dict, returned: Sequence[Any]
    ) -> None:
        """Raise CannotRecord for a tensor from outside the module that would have to be trained."""
        of_gradients = {nodes[place] for place in self.gradients}
        reached = leading_to(node for node in returned if isinstance(node, torch.fx.Node)) if self.ends is None else ()
        for node, real in zip(nodes, self.reals, strict=True):
            if id(real) in outside and real.requires_grad and (node in reached or node in of_gradients):
                lines = (source_line(user.stack_trace, own=True) for user in node.users)
                where = next((f", at {line}" for line in lines if line), "")
                raise CannotRecord(unregistered.refusal(entry, real) + where)

    def _replace_sizes(self, sizes: Sequence[torch.fx.Node]) -> None:
        """Compute the sizes that are inputs of the graph from the tensors that have them."""
        graph = self.module.graph
        tensors = [n for n in graph.nodes if n.op == "placeholder" and isinstance(n.meta.get("val"), torch.Tensor)]
        first = next(node for node in graph.nodes if node.op != "placeholder")
        for node in sizes:
            wanted = node.meta["val"].node.expr
            for tensor in tensors if node.users and not wanted.is_number else ():
                shape = [
                    size.node.expr if isinstance(size, torch.SymInt) else size for size in tensor.meta["val"].shape
                ]
                if wanted in shape:
                    with graph.inserting_before(first):
                        size = graph.call_function(torch.ops.aten.sym_size.int, (tensor, shape.index(wanted)))
                    size.meta["val"] = node.meta["val"]
                    node.replace_all_uses_with(size)
                    break
            if wanted.is_number:
                number = lambda used, size=node, value=int(wanted): value if used is size else used
                for user in list(node.users):
                    user.args = cast(tuple, torch.fx.node.map_arg(user.args, number))
            if node.users:
                raise Unfollowed(f"it computes with a size, {wanted}, of no tensor")
            graph.erase_node(node)


def _is_written(node: torch.fx.Node) -> bool:
    return any(writes(user) and user.args and user.args[0] is node for user in node.users)


def _drop_checks(module: torch.fx.GraphModule) -> None:
    """Leave out what raises in torch for some values: the checks of linear algebra, where the numbers are NaN, and
    `assert`, which is told."""
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten._assert_async.msg:
            _tell_assert(source_line(node.stack_trace))
            module.graph.erase_node(node)
        if str(node.target) == "with_effects" and node.args[1] is torch.ops.aten._linalg_check_errors.default:
            for user in list(node.users):
                user.replace_all_uses_with(node.args[0])
                module.graph.erase_node(user)
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    for node in placeholders(module):
        if node.name == "tangents_token" and not node.users:  # torch's, to keep such checks in their order
            module.graph.erase_node(node)


@functools.cache
def _tell_assert(line: str) -> None:
    log.warning("the check at %s is taken as passed: a compiled step does not look at values", line)


def _written_parameter(state: State, real: torch.Tensor, result: torch.fx.Node) -> UnsupportedModel:
    what = f"the forward pass writes the parameter {state.names[id(real)]}"
    place = Obstacle(what, source_line(result.stack_trace), module_path(result))
    return UnsupportedModel(type(getattr(state.entry, "wrapped_module", state.entry)).__name__, [place], ADVICE_WRITTEN)


def _name_in(entry: torch.nn.Module, real: torch.Tensor) -> str:
    tensors = (*entry.named_parameters(), *entry.named_buffers())
    return next((name.removeprefix("wrapped_module.") for name, tensor in tensors if tensor is real), "a tensor")


def _sizes(values: Sequence[Any]) -> Sizes:
    """Return what a graph takes: tensors with sizes or symbols of torch's, any sizes for those that it does not read,
    and plain values as they are."""
    inputs: list[tuple] = []
    environment = None
    for place, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            inputs.append((None, value))
            continue
        shape: list[Any] = [size.node.expr if isinstance(size, torch.SymInt) else int(size) for size in value.shape]
        if not isinstance(value, FakeTensor):
            shape = list(sympy.symbols(f"unread_{place}_:{value.dim()}", integer=True, nonnegative=True))
        environment = next((s.node.shape_env for s in value.shape if isinstance(s, torch.SymInt)), environment)
        inputs.append((category(jax_dtype(value.dtype)), tuple(shape)))
    return Sizes(tuple(inputs), *torch_api.size_guards(environment))


def _may_have_gradient(real: Any, leaves: Sequence[Any]) -> bool:
    """Return True for parameters, frozen ones too, as they may be trained later, and for inputs."""
    if not isinstance(real, torch.Tensor) or not (real.is_floating_point() or real.is_complex()):
        return False
    return real.requires_grad or isinstance(real, torch.nn.Parameter) or any(real is leaf for leaf in leaves)


def _explicit_cuts(module: torch.fx.GraphModule) -> None:
    """Write `detach` where a gradient ends, and only there."""
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    for node in module.graph.nodes:
        if node.target is torch.ops.torch_bridge.stop_gradient.default:
            node.target = torch.ops.aten.detach.default
    for node in module.graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            node.meta["nn_module_stack"] = {key: (_path(path), kind) for key, (path, kind) in stack.items()}


def _path(path: str) -> str:
    """Return the path below the entry of a module as Dynamo names it: L['entry'].wrapped_module.layers.0"""
    return path.partition("']")[2].removeprefix(".") if path.startswith("L['") else path
