"""Numbers inside recorded graphs as inputs, so that runs that differ in them share one compiled program.

Dropout rates, label smoothing and other numbers are constants of a recorded graph. Two recordings show which constants
differ; torch itself, run once per set of numbers with its operators observed (`observed`), shows what every one of them
is in every run. A constant becomes an input only if the two agree, and only of an operator of `ARITHMETIC` or
`DROPOUTS`: with any other, each value has a program of its own.
"""

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from jaxtrain.runtime import traced_hparams
from torch_bridge.lowering.interpreter import Graph

NEAR = 1e-9  # relative difference of two forms of one number, such as p and 1 - (1 - p)
ARITHMETIC = tuple(
    f"aten.{name}.{form}" for name in ("mul", "div", "add", "sub", "rsub") for form in ("Tensor", "Scalar")
)
DROPOUTS = ("aten.native_dropout.default", "aten.dropout.default", "aten.feature_dropout.default")


class NotLifted(Exception):
    """A constant of a graph that cannot become an input; the text says which and why."""


@dataclasses.dataclass(frozen=True)
class Observation:
    """Operators and numbers of one call in torch.

    structure: its operators, with everything that is not a float. floats: the numbers among their arguments, in order.
    """

    structure: tuple
    floats: tuple[float, ...]


class _Observer(TorchDispatchMode):
    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        super().__init__()
        self.alive: list[torch.Tensor] = list(tensors.values())  # so that no memory is used twice
        self.named = {_place(tensor): name for name, tensor in tensors.items()}
        self.structure: list[Any] = []
        self.floats: list[float] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        self.structure.append((str(function), str(spec), *map(self._seen, leaves)))
        result = function(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.alive.append(leaf)
                self.named.setdefault(_place(leaf), f"#{len(self.alive)}")
        return result

    def _seen(self, leaf: Any) -> Any:
        if isinstance(leaf, float):
            self.floats.append(leaf)
            return float
        if not isinstance(leaf, torch.Tensor):
            return repr(leaf)
        place, form = _place(leaf), f"{leaf.dtype} {tuple(leaf.shape)} {leaf.stride()}"
        if place in self.named:
            return f"{self.named[place]} {form}"
        if leaf.dim() == 0 and leaf.is_floating_point():  # a Python number that C++ has wrapped
            self.floats.append(leaf.item())
            return float
        self.alive.append(leaf)
        content = zlib.crc32(leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        self.named[place] = f"content {content}"
        return f"{self.named[place]} {form}"


def _place(tensor: torch.Tensor) -> int:
    """Return where a tensor's memory is: what autograd has saved comes back as another object with the same memory."""
    return tensor.untyped_storage().data_ptr()


def observed(
    entry: torch.nn.Module, state: Mapping[str, torch.Tensor], inputs: Sequence[Any], training: bool
) -> Observation:
    """Run a loss once in torch, in training with its backward pass, and return what torch computed.

    entry: returns {"value": scalar}; its buffers may change. state: tensors that each run has values of its own of, by
    name. What the content of any other tensor is belongs to the structure.
    """
    observer = _Observer({f"input {i}": leaf for i, leaf in enumerate(pytree.tree_leaves(inputs))} | dict(state))
    entry.train(training)
    with torch.random.fork_rng(), torch.set_grad_enabled(training), observer:
        torch.manual_seed(0)
        value = entry(*inputs)["value"]
        if training and value.requires_grad:
            value.backward()
    return Observation(tuple(observer.structure), tuple(observer.floats))


@dataclasses.dataclass(frozen=True)
class NumberedGraph(Graph):
    """A graph some of whose constants are inputs. numbers: placeholder -> key of the number, read where the program is
    traced (`traced_hparams.number`)."""

    numbers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def _arguments(self, state: Mapping[str, Any], inputs: Sequence[Any]) -> list[Any]:
        arguments = super()._arguments(state, inputs)
        for place, (placeholder, _) in enumerate(self.placeholders):
            if placeholder in self.numbers:
                value = traced_hparams.number(self.numbers[placeholder], self.constants[placeholder])
                arguments[place] = jnp.asarray(value, jnp.float32)
        return arguments


class Numbers:
    """The numbers of a group of runs. values: by key, one for each run, in float64.

    captured: the runs, by position, whose graphs are compared.
    """

    def __init__(self, settings: Sequence[np.ndarray], seen: Sequence[np.ndarray], captured: Sequence[int]):
        """settings: the runs' own, which are used where torch was seen to take them, or a form of them. seen: what
        torch took, place by place."""
        self.captured = list(captured)
        seen = [vector for vector in seen if len(set(vector.tolist())) > 1]
        taken = lambda v: any(np.allclose(vector, form, NEAR, 0) for vector in seen for form in _forms(v))
        self._vectors = [v for v in settings if len(set(v.tolist())) > 1 and taken(v)] + seen
        self._vectors += [1 - vector for vector in self._vectors]
        self.values: dict[str, np.ndarray] = {}

    def key(self, constants: Sequence[float]) -> str:
        """Return the key of the number that is these constants in the captured runs. Raises NotLifted if none is, or if
        several are that differ elsewhere."""
        wanted = np.array(constants)
        found = [v for v in self._vectors if np.allclose(v[self.captured], wanted, NEAR, 0)]
        if not found:
            raise NotLifted(f"{constants[0]:g} was not seen in torch's own call")
        if any(not np.allclose(v, found[0], NEAR, 0) for v in found):
            raise NotLifted(f"{constants[0]:g} may be one of two numbers")
        return self._keep(found[0])

    def _keep(self, vector: np.ndarray) -> str:
        for key, known in self.values.items():
            if np.array_equal(known, vector):
                return key
        key = f"{traced_hparams.OF_GRAPH}{len(self.values)}"
        self.values[key] = vector
        return key

    def complement(self, key: str) -> str:
        """Return the key of 1 - number."""
        return self._keep(1 - self.values[key])

    def explain(self, floats: np.ndarray) -> None:
        """Raise NotLifted for a number that torch takes and no input of the graphs accounts for. floats: [run, place]
        of one call."""
        for column in floats.T:
            if len(set(column.tolist())) == 1:
                continue
            if not any(_proportional(column, form) for v in self.values.values() for form in _forms(v)):
                raise NotLifted(f"torch takes {column[0]:g} where the recorded graph has no such number")

    def of_run(self, run: int) -> dict[str, np.float32]:
        return {key: np.float32(vector[run]) for key, vector in self.values.items()}


def _forms(v: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return what operators make of a number: itself, 1 - number, and the inverses of both."""
    with np.errstate(divide="ignore"):
        return v, 1 - v, 1 / v, 1 / (1 - v)


def _proportional(column: np.ndarray, form: np.ndarray) -> bool:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = column / form
    return bool(np.isfinite(ratio).all() and np.allclose(ratio, ratio[0], NEAR, 0))


def lift(graphs: Sequence[Graph], numbers: Numbers) -> Graph:
    """Return the first graph with the constants that differ between `graphs`, of the captured runs, as inputs.

    Raises NotLifted if the graphs differ otherwise, or in a constant that cannot be an input.
    """
    first = graphs[0]
    _same_constants(graphs)
    chosen = _differing([list(graph.module.graph.nodes) for graph in graphs], numbers)
    if not chosen:
        return first
    graph, copies = torch.fx.Graph(), {}
    graph.output(graph.graph_copy(first.module.graph, copies))
    begin = next(iter(graph.nodes))
    nodes: dict[str, torch.fx.Node] = {}

    def place(key: str) -> torch.fx.Node:
        if key not in nodes:
            with graph.inserting_before(begin):
                nodes[key] = graph.placeholder(f"number_{key.removeprefix(traced_hparams.OF_GRAPH)}")
        return nodes[key]

    for node, leaf, key in chosen:
        with graph.inserting_before(copies[node]):
            if str(node.target) in DROPOUTS:
                _drop(graph, copies[node], place(numbers.complement(key)))
            else:
                _compute(copies[node], leaf, place(key))
    graph.lint()
    module = torch.fx.GraphModule(first.module, graph)
    values = {node.name: np.float32(numbers.values[key][numbers.captured[0]]) for key, node in nodes.items()}
    own = {field.name: getattr(first, field.name) for field in dataclasses.fields(Graph)}
    own |= {"module": module, "constants": {**first.constants, **values}}
    own["placeholders"] = (*((node.name, None) for node in reversed(nodes.values())), *first.placeholders)
    in_order = [node.name for node in graph.nodes if node.op == "placeholder"]
    own["placeholders"] = tuple(sorted(own["placeholders"], key=lambda pair: in_order.index(pair[0])))
    return NumberedGraph(**own, numbers={node.name: key for key, node in nodes.items()})


def _same_constants(graphs: Sequence[Graph]) -> None:
    first = graphs[0].constants
    for other in (graph.constants for graph in graphs[1:]):
        if first.keys() != other.keys() or not all(np.array_equal(value, other[k]) for k, value in first.items()):
            raise NotLifted("the recorded graphs hold different constant tensors")


def _differing(rows: Sequence[Sequence[torch.fx.Node]], numbers: Numbers) -> list[tuple[torch.fx.Node, int, str]]:
    """Return (node, position of the leaf of its arguments, key of the number) of the first graph."""
    found = []
    if len({len(nodes) for nodes in rows}) > 1:
        raise NotLifted("the recorded graphs differ in length")
    for nodes in zip(*rows, strict=True):
        leaves = [pytree.tree_leaves((node.args, node.kwargs)) for node in nodes]
        if len({(node.op, node.name, str(node.target)) for node in nodes}) > 1 or len({len(e) for e in leaves}) > 1:
            raise NotLifted(f"the recorded graphs differ at {nodes[0].name}")
        own = []
        for place, values in enumerate(zip(*leaves, strict=True)):
            if len({str(value) for value in values}) > 1:
                if not all(isinstance(value, float) for value in values):
                    raise NotLifted(f"{nodes[0].target} takes {values[0]!r} in one run and {values[-1]!r} in another")
                own.append((nodes[0], place, numbers.key(values)))
        name = str(nodes[0].target)
        if not own or name in DROPOUTS and nodes[0].args[2:] == (False,):
            continue
        if name not in (*ARITHMETIC, *DROPOUTS) or len(own) > 1:
            raise NotLifted(f"{name} takes its number when it is compiled")
        found += own
    return found


def _compute(node: torch.fx.Node, place: int, number: torch.fx.Node) -> None:
    """Make a leaf of an arithmetic operator's arguments an input."""
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    leaves[place] = number
    node.args, node.kwargs = pytree.tree_unflatten(leaves, spec)
    operator: Any = node.target
    node.target = operator.overloadpacket.Tensor


def _drop(graph: torch.fx.Graph, node: torch.fx.Node, kept: torch.fx.Node) -> None:
    """Replace a dropout by operators that take the fraction kept as an input; they draw the same numbers."""
    aten, x = torch.ops.aten, node.args[0]
    shown: Any = x
    if str(node.target) == "aten.feature_dropout.default":  # one draw for each channel
        axes = list(range(2, x.meta["val"].dim()))
        shown = graph.call_function(aten.amax.default, (x, axes, True)) if axes else x
    drawn = graph.call_function(aten.bernoulli.p, (shown, kept))
    mask = graph.call_function(aten.gt.Scalar, (drawn, 0))
    scaled = graph.call_function(aten.div.Tensor, (x, kept))
    out = graph.call_function(aten.where.ScalarOther, (mask, scaled, 0.0))
    for added in (shown, drawn, mask, scaled, out):
        added.meta = dict(added.meta) if added is x else dict(node.meta)
    if str(node.target) != "aten.native_dropout.default":
        node.replace_all_uses_with(out)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(out if user.args[1] == 0 else mask)
            graph.erase_node(user)
    graph.erase_node(node)
