"""An ATen graph that torch calls: tensors in and out, computed by JAX, or by torch where JAX cannot."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import _pytree as pytree

from jaxtrain.errors import UserError
from jaxtrain.runtime.prng import Rngs
from torch_bridge.capture import artefacts, decompositions
from torch_bridge.capture.aten_program import AtenProgram, Numbers
from torch_bridge.capture.memory import Input, Layout, Order
from torch_bridge.capture.observed import Observed, concrete
from torch_bridge.datasets import is_dense, kind_of
from torch_bridge.exchange import precision
from torch_bridge.lowering.errors import CannotRecord, source_line
from torch_bridge.lowering.index_checks import IndexChecks
from torch_bridge.lowering.raising import raising
from torch_bridge.lowering.table import Call

_WIDE = (torch.float64, torch.complex128)
_STATE = "rng_state"  # in the names of operators that store or restore a random state
MOST_PROGRAMS = 64  # of one graph, for sizes that change

log = logging.getLogger("torch_bridge.capture.backend")


class Halves:
    """What the forward and backward graphs of one capture share. in_torch: both must run in torch."""

    def __init__(self) -> None:
        self.in_torch = False
        self.stores_state = False  # forward stores a random state for backward: torch's and JAX's are unlike


class CompiledGraph:
    """Call with a list of inputs, which is emptied; returns the list of outputs. Not differentiable: AOTAutograd is
    around it.

    module: a functional graph of ATen operators. kind: "forward", "backward" or "inference". fixed: positions of
    inputs that are the same tensors at each call.

    Results have torch's dtypes and strides. Where JAX has no lowering, or one that refuses these values, the graph runs
    in torch, and one line says why.
    """

    def __init__(self, module: torch.fx.GraphModule, kind: str, fixed: frozenset[int], halves: Halves):
        self._module, self._kind, self._halves = module, kind, halves
        artefacts.show_graph(kind, module)
        halves.stores_state |= any(_STATE in str(node.target) for node in _nodes(module))
        self._why = refusal(module)
        if self._why:
            self._leave(self._why)
            return
        self._program = program = AtenProgram(_copy(module), hand_on=False)
        self._inputs = [Input(place in fixed) for place in program.tensors]
        self._shaped = [i for i in program.tensors if _is_symbolic(program.inputs[i].meta["val"])]
        tensors = [t for node in (*_nodes(program.module), *program.read()) for t in _tensors(node)]
        self._wide = any(tensor.dtype in _WIDE for tensor in tensors)
        self._draws = any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in _nodes(module))
        self._draws |= halves.stores_state
        self._indices = (
            IndexChecks(program.module, [n.name for n in program.inputs], {}) if kind != "backward" else None
        )
        self._raises = raising(program.module)
        self._programs: dict[Any, _Program] = {}

    def __call__(self, arguments: list) -> list:
        inputs = list(arguments)
        arguments.clear()
        if self._why or (self._halves.in_torch and self._halves.stores_state):
            return self._in_torch(inputs)
        try:
            outputs = self._in_jax(inputs)
        except (CannotRecord, NotImplementedError) as error:
            if self._kind == "backward" and self._halves.stores_state:
                raise UserError(
                    "the backward pass repeats random numbers of the forward pass, in a checkpoint, without a form in JAX: "
                    f"{error}. Leave this part out of torch.compile, by torch.compiler.disable"
                ) from error
            self._leave(str(error))
            return self._in_torch(inputs)
        return self._in_torch(inputs) if outputs is None else outputs

    def _in_torch(self, inputs: list) -> list:
        with torch.no_grad():
            return pytree.tree_leaves(self._module(*inputs), is_leaf=lambda value: value is None)

    def _in_jax(self, inputs: list) -> list | None:
        """Compute the outputs; return None where torch would raise for these values, or might."""
        numbers, every = self._program.numbers(inputs)
        arrays, orders = [], []
        for place, reader in zip(self._program.tensors, self._inputs, strict=True):
            array, order = reader.read(inputs[place])
            arrays.append(array)
            orders.append(order)
        key = numbers.sizes, tuple(orders), tuple([inputs[place].shape for place in self._shaped])
        program = self._programs.get(key)
        if program is None:
            if len(self._programs) >= MOST_PROGRAMS:
                raise CannotRecord(
                    f"it has come in {MOST_PROGRAMS} sizes, each of which is compiled: pad to a few lengths"
                )
            program = _Program(self._program, numbers.sizes, tuple(orders), every, self._kind)
        if self._indices is not None:
            self._indices.check(every, lambda: program.symbols)
        seed = int(torch.randint(1 << 31, ())) if self._draws else 0
        with precision(self._wide):
            outputs, asserted = program.compute(arrays, numbers.free, np.uint32(seed))
        self._programs[key] = program
        if not all(asserted) or (self._raises and not all(map(_is_finite, outputs))):
            return None
        for place, given in self._program.passed.items():
            outputs[place] = every[given]
        return outputs

    def _leave(self, why: str) -> None:
        self._why, self._halves.in_torch = why, True
        count = sum(isinstance(node.target, torch._ops.OpOverload) for node in _nodes(self._module))
        log.warning("a %s graph of %d operators runs in torch: %s", self._kind, count, why)


def refusal(module: torch.fx.GraphModule) -> str:
    """Return why JAX cannot compute a graph; "" if it can, as far as operators and dtypes tell."""
    missing = decompositions.without_lowering(module)
    if missing:
        lines = [source_line(node.stack_trace) for node in _nodes(module) if str(node.target) in missing]
        where = next((f", at {line}" for line in lines if line), "")
        return f"no lowering for {', '.join(sorted(missing))}{where}"
    values = [value for node in module.graph.nodes for value in pytree.tree_leaves(node.meta.get("val"))]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if odd := next((tensor for tensor in tensors if not is_dense(tensor) and not tensor.is_meta), None):
        return f"a {kind_of(odd)} tensor in it"
    devices = {tensor.device for tensor in tensors if tensor.dim() or not tensor.is_cpu}
    platforms = {"cpu", *(device.platform.replace("gpu", "cuda") for device in jax.devices())}
    if len(devices) > 1 or not {device.type for device in devices} <= platforms:
        return f"tensors on {', '.join(sorted(map(str, devices)))}, and JAX has {', '.join(sorted(platforms))}"
    generators = [node for node in _nodes(module) if node.kwargs.get("generator") is not None]
    return f"{generators[0].target} with a generator of its own" if generators else ""


class _Program:
    """The XLA program for one set of sizes and memory layouts."""

    def __init__(self, program: AtenProgram, sizes: tuple, orders: tuple[Order, ...], every: list, kind: str):
        self._program, self._sizes, self._orders, self._kind = program, sizes, orders, kind
        self.symbols = symbols_of(program.inputs, every)
        self._layouts = [self._layout(node) for node in program.outputs]
        self._constants: dict[int, Any] = {}  # outputs that are no arrays; known after tracing
        self._jitted: Callable = jax.jit(self._traced)

    def compute(self, arrays: list, free: tuple, seed: np.uint32) -> tuple[list, list[bool]]:
        """Return the outputs as torch takes them, None for those that are inputs, and the asserted conditions."""
        if "jaxpr" in artefacts.chosen() and not self._constants:
            artefacts.show("jaxpr", self._kind, self._jitted.trace(arrays, free, seed).jaxpr)
        computed, asserted = self._jitted(arrays, free, seed)
        jax.block_until_ready(computed)
        feed = iter(computed)
        outputs = []
        for place, layout in enumerate(self._layouts):
            if place in self._constants:
                outputs.append(self._constants[place])
            elif layout is None:  # a number that torch reads out of a tensor
                outputs.append(next(feed).item())
            else:
                outputs.append(layout.show(next(feed)))
        return outputs, asserted

    def _traced(self, arrays: list, free: tuple, seed: jax.Array) -> tuple[list, list]:
        observed = Observed(self._program.module, self.symbols)
        call = Call(Rngs(jax.random.key(seed)), observe=observed)
        arrays = [
            a if o is None else jnp.transpose(a, np.argsort(o)) for a, o in zip(arrays, self._orders, strict=True)
        ]
        results = self._program.run(arrays, Numbers(self._sizes, free), call)
        computed = []
        for place, (result, layout) in enumerate(zip(results, self._layouts, strict=True)):
            if not hasattr(result, "dtype"):
                self._constants[place] = result
            else:
                computed.append(result if layout is None else layout.store(result))
        return computed, observed.asserted

    def _layout(self, node: Any) -> Layout | None:
        value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
        if not isinstance(value, torch.Tensor):
            return None
        known = lambda sizes: [concrete(size, self.symbols) for size in sizes]
        return Layout(known(value.shape), known(value.stride()), value.dtype)


def symbols_of(nodes: Sequence[torch.fx.Node], values: Sequence[Any]) -> dict[Any, int]:
    """Return the values of the symbols that stand for sizes of the inputs."""
    found: dict[Any, int] = {}

    def note(size: Any, number: Any) -> None:
        if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
            found[size.node.expr] = int(number)

    for node, value in zip(nodes, values, strict=True):
        known = node.meta.get("val")
        if isinstance(known, torch.Tensor) and isinstance(value, torch.Tensor):
            for size, number in zip(known.shape, value.shape, strict=True):
                note(size, number)
        else:
            note(known, value)
    return found


def _nodes(module: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """Yield the operators of a graph and of the graphs inside it."""
    for inner in module.modules():
        if isinstance(inner, torch.fx.GraphModule):
            yield from (node for node in inner.graph.nodes if node.op == "call_function")


def _copy(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Copy the graph, which AtenProgram changes; the modules inside are the same."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return torch.fx.GraphModule(module, graph)


def _tensors(node: torch.fx.Node) -> list[torch.Tensor]:
    return [value for value in pytree.tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor)]


def _is_symbolic(tensor: torch.Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in tensor.shape)


def _is_finite(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or bool(value.isfinite().all())
