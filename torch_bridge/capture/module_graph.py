"""A module's forward pass, or its loss, as one graph that TorchDynamo captures and that JAX differentiates.

The modules and tensors that the code reaches are inputs of the graph; numbers and settings that it reads are constants.
Code that has a part in its own backward pass, or that changes something in Python at every call, is refused.
"""

import collections
import contextlib
import contextvars
import dataclasses
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

from torch_bridge.capture import artefacts, decompositions, torch_api
from torch_bridge.capture.aten_program import output_of
from torch_bridge.capture.attention import formula_if_twice, one_operator
from torch_bridge.capture.compiled_graph import refusal
from torch_bridge.capture.cuts import CuttingReplay, check
from torch_bridge.capture.replay import check_backward
from torch_bridge.lowering import constant_tensors
from torch_bridge.lowering.dtypes import category, jax_dtype
from torch_bridge.lowering.errors import CannotRecord, Unfollowed
from torch_bridge.lowering.interpreter import Graph
from torch_bridge.lowering.recording.sizes import Sizes
from torch_bridge.lowering.structure import Structure, with_fields

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclasses.dataclass
class State:
    """The tensors of a module by identity. names: of parameters and buffers that a graph takes from its caller;
    written: further ones that it takes if it writes them. trained: ids of parameters with a gradient."""

    names: dict[int, str]
    written: dict[int, str]
    trained: set[int]


def module_graph(
    call: Callable,
    entry: torch.nn.Module,
    inputs: tuple,
    state: State,
    free: Sequence[Collection[int]],
) -> tuple[Graph, dict[int, torch.Tensor]]:
    """Return the graph of `call(entry, inputs)`, and the tensors from outside the module that it holds as constants, by
    id.

    call: a function that Dynamo captures. inputs: examples, containers of tensors and plain values; sizes matter,
    values do not. free: of each leaf of the inputs, the axes that may have other sizes later. Raises CannotRecord for
    code that does not become one graph, and whatever torch raises as it runs the code on tensors without values.
    """
    leaves, spec = pytree.tree_flatten(inputs)
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
            raise Unfollowed(f"it is given a {type(leaf).__name__}")
    if torch_api.is_off() or torch_api.has_global_hooks():
        raise Unfollowed("torch.compile is switched off, or hooks see every module")
    _check_hooks(entry)
    try:
        return _settled(call, entry, leaves, spec, state, free)
    except Exception as error:
        if not (torch_api.needs_numbers(error) and any(isinstance(leaf, torch.Tensor) for leaf in leaves)):
            raise
    return _settled(call, entry, leaves, spec, state, None)


def _settled(call: Callable, entry: torch.nn.Module, leaves: list, spec: Any, state: State, free: Any):
    """Return the result of module_graph. Code that changes something in Python is read twice: what it sets once and for
    all, as a default, leads to the same graph again."""
    first = _Capture(call, entry, leaves, spec)
    result = first.graph(free, state)
    if changed := first.changed():
        second = _Capture(call, entry, leaves, spec)
        second.read(free)
        if second.code != first.code:
            raise Unfollowed(f"it computes otherwise after it has changed {', '.join(changed[:3])}")
    return result


def _check_hooks(entry: torch.nn.Module) -> None:
    """Raise Unfollowed for hooks on gradients, which JAX does not run."""
    for inner in entry.modules():
        if inner._backward_hooks or inner._backward_pre_hooks:
            raise Unfollowed("a module has a hook on its gradients")
    for parameter in entry.parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise Unfollowed("a parameter has a hook on its gradient")


class _Capture:
    """One capture. Dynamo reads the code and asks for a program of its graph; that program only marks its results."""

    def __init__(self, call: Callable, entry: torch.nn.Module, leaves: list, spec: Any):
        self._call, self._entry, self._spec = call, entry, spec
        self._leaves = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._symbolic = False
        self._marks: list[Any] = []
        self._before: list[tuple[str, Any, Any]] = []  # what the code changes in Python: name, object, its contents
        self._only_read = False
        self.code: tuple = ()  # of Dynamo's graph, with the tensors that it takes
        self.traced: _Traced | None = None

    def read(self, free: Any) -> None:
        """Let Dynamo read the code, for `code` alone."""
        self._only_read = True
        with contextlib.suppress(_Enough):
            self._run(free)

    def changed(self) -> list[str]:
        """Return the names of the objects outside that the call has changed for good."""
        return [name for name, value, before in self._before if _contents(value) != before]

    def _run(self, free: Any) -> Any:
        self._symbolic = free is not None
        captured = torch_api.whole(self._call, self._compile, self._ignore, self._ignore)
        try:
            with torch.enable_grad(), torch_api.free_sizes(self._leaves, free):
                return captured(self._entry, pytree.tree_unflatten(self._leaves, self._spec))
        except Exception as error:
            cause = torch_api.cause_of(error)
            if cause is error:
                raise
            raise cause from error

    def graph(self, free: Sequence[Collection[int]] | None, state: State) -> tuple[Graph, dict]:
        returned = self._run(free)
        if self.traced is None:
            raise Unfollowed("it computes nothing with tensors")
        leaves, spec = pytree.tree_flatten(with_fields(returned))
        if lost := {id(mark) for mark in self._marks} - {id(leaf) for leaf in leaves}:
            raise Unfollowed(f"it keeps {len(lost)} results in Python")
        places = {id(mark): _Result(place) for place, mark in enumerate(self._marks)}
        known = lambda leaf: leaf if isinstance(leaf, (torch.Tensor, *_PLAIN)) else None  # a cache of keys and values
        outputs = [places.get(id(leaf), known(leaf)) for leaf in leaves]
        return self.traced.finished(outputs, spec, self._leaves, state)

    def _ignore(self, _: Any) -> None:
        """Guards are not needed: what the code reads in Python is watched by its names."""

    def _compile(self, gm: torch.fx.GraphModule, fakes: Sequence[Any]) -> Callable:
        """Trace the graph: a backend of Dynamo's. Raises CannotRecord to refuse it."""
        wrong = torch_api.stale() or torch_api.lost_writes() or torch_api.keeps_padding(gm.graph)
        if wrong := wrong or torch_api.unguarded_line(self._symbolic) or torch_api.hooked():
            raise Unfollowed(f"Dynamo does not follow {wrong}")
        check_backward(gm)
        check(gm)
        reals = torch_api.real_inputs(gm)
        self.code = (gm.code, [id(real) for real in reals if isinstance(real, torch.nn.Parameter)])
        if self._only_read:
            raise _Enough
        self._before = [(name, value, _contents(value)) for name, value in torch_api.written_objects()]
        self.traced = _Traced.of(gm, fakes, self._leaves)
        self._marks = [_Number() if kind is int else torch.empty(0) for kind in self.traced.kinds]
        return lambda *inputs: self._marks


class _Enough(Exception):
    """Ends a capture whose graph is known."""


def _contents(value: Any) -> Any:
    """Return what an object holds, to be compared: by identity, but for plain values."""
    identity = lambda item: (type(item), item) if isinstance(item, _PLAIN) else id(item)
    if isinstance(value, contextvars.ContextVar):
        return identity(value.get(None))
    if isinstance(value, types.CellType):
        return identity(value.cell_contents)
    if isinstance(value, dict):
        return [(identity(key), identity(item)) for key, item in value.items()]
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        return [identity(item) for item in value]
    if not hasattr(value, "__dict__"):
        return object()  # an iterator, or what only Dynamo's own names lead to: never the same
    return [(key, identity(item)) for key, item in value.__dict__.items()]


class _Number(int):
    """Stands for a number that the graph computes, until it is known which output it is."""


@dataclasses.dataclass(frozen=True)
class _Result:
    """An output of the call: this result of the graph."""

    place: int


@dataclasses.dataclass
class _Traced:
    """A functional graph. reals: of each input, the tensor that it was captured with; None for a size. kinds: of each
    result, torch.Tensor or int. written: positions of the inputs that it writes; their new values come first."""

    module: torch.fx.GraphModule
    reals: list[Any]
    kinds: list[type]
    written: list[int]

    @classmethod
    def of(cls, gm: torch.fx.GraphModule, fakes: Sequence[Any], leaves: Sequence[Any]) -> "_Traced":
        reals = torch_api.real_inputs(gm)
        for place, (fake, real) in enumerate(zip(fakes, reals, strict=True)):
            if isinstance(fake, torch.SymInt):
                reals[place] = None
            elif not isinstance(real, torch.Tensor):
                raise Unfollowed(f"it computes with {type(real).__name__}, which Python may change")
        kinds: list[type] = []
        shapes = [size for value in fakes if isinstance(value, torch.Tensor) for size in value.shape]
        changes = not all(type(size) is int for size in shapes)  # warnings would show symbols, and have been shown
        graded = [place for place, real in enumerate(reals) if _may_have_gradient(real, leaves)]

        def step(*arguments: Any) -> list:
            inputs = list(arguments)
            with torch.enable_grad(), torch.fx.traceback.preserve_node_meta():
                for place in graded:
                    inputs[place] = inputs[place].detach().requires_grad_()
                results = list(CuttingReplay(gm, mode, warns=not changes).run(*inputs))
            for result in results:
                if not isinstance(result, torch.Tensor | torch.SymInt):
                    raise Unfollowed(f"it returns {type(result).__name__}")
            kinds.extend(int if isinstance(result, torch.SymInt) else torch.Tensor for result in results)
            return [result.detach() if isinstance(result, torch.Tensor) else result for result in results]

        with formula_if_twice(gm), one_operator() as mode:
            module, written = torch_api.functional_graph(step, fakes, decompositions.rules())
        _explicit_cuts(module)
        if why := refusal(module):
            raise CannotRecord(why)
        artefacts.show_graph("a module's graph", module)
        return cls(module, reals, kinds, written)

    def finished(self, outputs: list, spec: Any, leaves: Sequence[Any], state: State) -> tuple[Graph, dict]:
        """Return the Graph with these outputs, and the outside tensors that it holds."""
        graph = self.module.graph
        nodes = [node for node in graph.nodes if node.op == "placeholder"]
        of_leaf = self._leaf_nodes(nodes, leaves)
        names, constants, outside = self._tensors(nodes, {*of_leaf.values()}, state)
        constants |= {of_leaf[i].name: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
        if any(id(self.reals[place]) in state.trained for place in self.written):
            raise Unfollowed("it writes to a parameter")
        results = list(cast(Sequence, output_of(self.module).args[0]))
        new_values = [(results[n], names[nodes[i]]) for n, i in enumerate(self.written) if nodes[i] in names]
        by_tensor = {id(real): node for node, real in zip(nodes, self.reals, strict=True) if real is not None}
        by_tensor |= {id(leaf): of_leaf[place] for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        returned: list[Any] = []
        for output in outputs:
            if isinstance(output, _Result):
                returned.append(results[len(self.written) + output.place])
            elif isinstance(output, torch.Tensor) and id(output) not in by_tensor:
                raise Unfollowed("it returns a tensor from outside the module")
            else:
                returned.append(by_tensor[id(output)] if isinstance(output, torch.Tensor) else output)
        output_of(self.module).args = ([*(node for node, _ in new_values), *returned],)
        self._replace_sizes([node for node, real in zip(nodes, self.reals, strict=True) if real is None])
        graph.eliminate_dead_code()
        self.module.recompile()
        made = Graph(
            module=self.module,
            placeholders=tuple((node.name, names.get(node)) for node in graph.nodes if node.op == "placeholder"),
            inputs=tuple(of_leaf[place].name for place in range(len(leaves))),
            constants=constants,
            outputs=(
                *((OutputKind.BUFFER_MUTATION, name) for _, name in new_values),
                *((OutputKind.USER_OUTPUT, None) for _ in returned),
            ),
            structure=Structure.of(spec),
            spec=spec,
            sizes=_sizes([of_leaf[place].meta["val"] for place in range(len(leaves))]),
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

    def _tensors(self, nodes: Sequence[torch.fx.Node], inputs: set, state: State) -> tuple[dict, dict, dict]:
        """Return the names of the placeholders that are state, the values of those that are constants, by name, and the
        outside tensors that these are, by id."""
        names, constants, outside = {}, {}, {}
        for place, (node, real) in enumerate(zip(nodes, self.reals, strict=True)):
            if real is None or node in inputs:
                continue
            name = state.names.get(id(real)) or (state.written.get(id(real)) if place in self.written else None)
            if name is not None:
                names[node] = name
            elif place in self.written:
                raise Unfollowed("it writes to a tensor from outside the module")
            else:
                constants[node.name], outside[id(real)] = constant_tensors.copied(real), real
        return names, constants, outside

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
    return Sizes.of_environment(tuple(inputs), environment)


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
