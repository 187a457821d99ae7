"""An ATen graph that torch calls: tensors in and out, computed by JAX, or by torch where JAX cannot."""

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import sympy
import torch
from torch.utils import _pytree as pytree

from jaxtrain.errors import UserError
from jaxtrain.runtime.background import Compilation, compile_later, compiled
from jaxtrain.runtime.prng import Rngs
from jaxtrain.runtime.waits import Waits, inputs_of
from torch_bridge.capture import artefacts, decompositions
from torch_bridge.capture.aten_program import AtenProgram, Numbers
from torch_bridge.capture.meanwhile import drawing_from, must_wait, one_core_less
from torch_bridge.capture.memory import Input, Layout, Order
from torch_bridge.capture.observed import Observed, concrete
from torch_bridge.capture.unreached import Tangents
from torch_bridge.datasets import is_dense, kind_of
from torch_bridge.exchange import precision
from torch_bridge.lowering.errors import CannotRecord, line_in
from torch_bridge.lowering.raising import raising
from torch_bridge.lowering.table import Call

_WIDE = (torch.float64, torch.complex128)
_STATE = "rng_state"  # in the names of operators that store or restore a random state
MOST_PROGRAMS = 64  # of one graph, for sizes that change
TRACE_S = 1e-3  # per operator: what tracing for one more size takes of the caller's time

log = logging.getLogger("torch_bridge.capture.backend")


class Halves:
    """State that the forward and backward graphs of one capture share. in_torch: both must run in torch. wait: for
    every program, instead of computing in torch while XLA compiles it."""

    def __init__(self, wait: bool = False) -> None:
        self.in_torch = False
        self.wait = wait
        self.stores_state = False  # forward stores a random state for backward: torch's and JAX's are unlike


class _CompilerFailed(Exception):
    """XLA cannot compile a program, or run it for the first time."""


class CompiledGraph:
    """Call with a list of inputs, which is emptied; returns the list of outputs. Not differentiable: AOTAutograd is
    around it.

    module: a functional graph of ATen operators. kind: "forward", "backward" or "inference". fixed: positions of
    inputs that are the same tensors at each call.

    Results have torch's dtypes and strides. Where JAX has no lowering, or one that refuses these values, the graph runs
    in torch, and one line says why. While XLA compiles a program, torch computes: what a forward graph keeps for its
    backward graph are values of ATen operators, whichever computes them.
    """

    def __init__(self, module: torch.fx.GraphModule, kind: str, fixed: frozenset[int], halves: Halves):
        self._module, self._kind, self._halves = module, kind, halves
        self._tangents = Tangents(module) if kind == "backward" else None
        artefacts.show_graph(kind, module)
        halves.stores_state |= any(_STATE in str(node.target) for node in _nodes(module))
        self._why = refusal(module)
        if self._why:
            self._leave(self._why)
            return
        self._program = program = AtenProgram(_copy(module), hand_on=False)
        self._inputs = [Input(place in fixed) for place in program.tensors]
        of_dtype = lambda place: program.inputs[place].meta["val"].dtype
        self._whole = [
            array for array, i in enumerate(program.tensors) if of_dtype(i) is torch.int64
        ]  # in 32 bits or 64
        self._shaped = [i for i in program.tensors if _is_symbolic(program.inputs[i].meta["val"])]
        tensors = [t for node in (*_nodes(program.module), *program.read()) for t in _tensors(node)]
        self._wide = any(tensor.dtype in _WIDE for tensor in tensors)
        self._on_gpu = any(tensor.is_cuda for tensor in tensors)
        self._beside_gpu = not self._on_gpu and jax.default_backend() != "cpu"
        self._draws = any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in _nodes(module))
        self._draws |= halves.stores_state
        self._raises = raising(program.module)
        self._programs: dict[Any, _Program] = {}
        sized = self._shaped or any(program.host.is_size.values())
        self._patience_s = TRACE_S * len(list(_nodes(module))) if sized else 0.0  # a size may come but once or twice
        self._torch_s: dict[Any, float] = {}  # by size: how long torch has computed it
        self._waits = Waits(self._name, line_in)

    @property
    def _name(self) -> str:
        count = sum(isinstance(node.target, torch._ops.OpOverload) for node in _nodes(self._module))
        return f"{'an' if self._kind == 'inference' else 'a'} {self._kind} graph of {count} operators"

    def __call__(self, arguments: list) -> list:
        inputs = list(arguments)
        arguments.clear()
        unreached = self._tangents.unreached(inputs) if self._tangents is not None else ()
        outputs = self._computed(inputs)
        return [None if place in unreached else value for place, value in enumerate(outputs)] if unreached else outputs

    def _computed(self, inputs: list) -> list:
        if self._why or (self._halves.in_torch and self._halves.stores_state):
            return self._in_torch(inputs)
        try:
            with self._device(), precision(self._wide):
                outputs = self._in_jax(inputs)
        except (CannotRecord, NotImplementedError, _CompilerFailed) as error:
            if self._program.freeze_numbers():
                return self._computed(inputs)
            if self._kind == "backward" and self._halves.stores_state:
                raise UserError(
                    f"the backward pass draws random numbers of the forward pass again (checkpoint), where {error}. "
                    "Leave this part out of torch.compile, by torch.compiler.disable"
                ) from error
            self._leave(str(error))
            return self._in_torch(inputs)
        return self._in_torch(inputs) if outputs is None else outputs

    def _device(self) -> contextlib.AbstractContextManager:
        """Return the context in which JAX computes where the tensors are. What torch still does to them on a GPU comes
        first."""
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
        return jax.default_device(jax.devices("cpu")[0]) if self._beside_gpu else contextlib.nullcontext()

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
        shapes = tuple([inputs[place].shape for place in self._shaped])
        widths = tuple([arrays[place].dtype for place in self._whole])
        key = numbers.sizes, tuple(orders), shapes, widths, tuple(map(type, numbers.free))
        program = self._programs.get(key)
        known = program is not None and program.has_run
        wait = not known and self._must_wait()
        seed = int(torch.randint(1 << 31, (), device="cpu")) if self._draws else 0
        if program is None and not wait and self._torch_s.get(key, 0.0) < self._patience_s:
            began = time.perf_counter()
            outputs = self._meanwhile(inputs, seed)
            self._torch_s[key] = self._torch_s.get(key, 0.0) + time.perf_counter() - began
            return outputs
        if program is None:
            if len(self._programs) >= MOST_PROGRAMS:
                raise CannotRecord(
                    f"it has come in {MOST_PROGRAMS} sizes, each of which is compiled: pad to a few lengths"
                )
            program = _Program(self._program, numbers.sizes, tuple(orders), every, self._kind, self._wide)
        what = ("is compiled", inputs_of(_shapes(arrays))) if wait else ("is traced",)
        try:
            with contextlib.nullcontext() if known else self._waits.during(*what):
                ready = known or program.is_ready(arrays, numbers.free, np.uint32(seed), wait)
                self._programs[key] = program
                if not ready:
                    return self._meanwhile(inputs, seed)
                outputs, holds = program.compute(arrays, numbers.free, np.uint32(seed))
        except jax.errors.JaxRuntimeError as error:
            if known:
                raise
            self._programs.pop(key, None)
            raise _CompilerFailed(str(error).partition("\n")[0]) from error
        if not holds or (self._raises and not all(map(_is_finite, outputs))):
            return None
        for place, given in self._program.passed.items():
            outputs[place] = every[given]
        return outputs

    def _must_wait(self) -> bool:
        """Return True if a program is waited for: as everywhere, and where the graph stores or restores a random state,
        which is torch's or JAX's."""
        return must_wait(self._halves.wait or self._halves.stores_state)

    def _meanwhile(self, inputs: list, seed: int) -> list:
        """Compute in torch, which draws from a generator with this seed: torch's own advances as for a program."""
        with one_core_less(), drawing_from(seed) if self._draws else contextlib.nullcontext():
            return self._in_torch(inputs)

    def _leave(self, why: str) -> None:
        self._why, self._halves.in_torch = why, True
        log.warning("%s runs in torch: %s", self._name, why)


def refusal(module: torch.fx.GraphModule) -> str:
    """Return why JAX cannot compute a graph; "" if it can, as far as operators and dtypes tell."""
    if why := decompositions.refusal(module):
        return why
    values = [value for node in module.graph.nodes for value in pytree.tree_leaves(node.meta.get("val"))]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        if not is_dense(tensor):
            return f"a {kind_of(tensor)} tensor in it"
    devices = {tensor.device for tensor in tensors if tensor.dim() or not tensor.is_cpu}
    platforms = {"cpu", *(device.platform.replace("gpu", "cuda") for device in jax.devices())}
    if len(devices) > 1 or not {device.type for device in devices} <= platforms:
        return f"tensors on {', '.join(sorted(map(str, devices)))}, and JAX has {', '.join(sorted(platforms))}"
    generators = [node for node in _nodes(module) if node.kwargs.get("generator") is not None]
    return f"{generators[0].target} with a generator of its own" if generators else ""


class _Program:
    """The XLA program for one set of sizes and memory layouts."""

    def __init__(
        self, program: AtenProgram, sizes: tuple, orders: tuple[Order, ...], every: list, kind: str, wide: bool
    ):
        self._program, self._sizes, self._orders, self._kind, self._wide = program, sizes, orders, kind, wide
        self._symbols = symbols_of(program.inputs, every)
        self._layouts = [self._layout(node) for node in program.outputs]
        places = [(o, node) for o, node in enumerate(program.outputs) if isinstance(node, torch.fx.Node)]
        first = {node: o for o, node in reversed(places)}
        self._again = {o: first[node] for o, node in places if first[node] != o}
        self._constants: dict[int, Any] = {}  # outputs that are no arrays; known after tracing
        self._jitted: Callable = jax.jit(self._traced)
        self._compilation: Compilation | None = None
        self.has_run = False

    def is_ready(self, arrays: list, free: tuple, seed: np.uint32, wait: bool) -> bool:
        """Return False while XLA compiles the program in the background, which the first call begins, unless it shall
        `wait` or the compile cache has it. Raises what tracing or compiling raises."""
        if self._compilation is None:
            given = [_abstract(array) for array in arrays], free, seed
            traced = self._jitted.trace(*given)
            if "jaxpr" in artefacts.chosen():
                artefacts.show("jaxpr", self._kind, traced.jaxpr)
            portable = not (self._wide or any(array.dtype == np.int64 for array in arrays))  # JAX exports 32 bits
            begin = compiled if wait else functools.partial(compile_later, portable=portable)
            self._compilation = begin(self._jitted, given)
        return self._compilation.done()

    def compute(self, arrays: list, free: tuple, seed: np.uint32) -> tuple[list, bool]:
        """Return the outputs as torch takes them, None for those that are inputs; and False if torch would raise."""
        computed, holds = self._compilation.program(arrays, free, seed)
        self.has_run = True
        jax.block_until_ready(computed)
        feed = iter(computed)
        outputs = []
        for place, layout in enumerate(self._layouts):
            if place in self._again:
                outputs.append(outputs[self._again[place]])
            elif place in self._constants:
                outputs.append(self._constants[place])
            elif layout is None:  # a number that torch reads out of a tensor
                outputs.append(next(feed).item())
            else:
                outputs.append(layout.show(next(feed)))
        return outputs, holds is None or bool(holds)

    def _traced(self, arrays: list, free: tuple, seed: jax.Array) -> tuple[list, Any]:
        observed = Observed(self._program.module, self._symbols, indices=self._kind != "backward")
        call = Call(Rngs(jax.random.key(seed)), observe=observed)
        pairs = zip(arrays, self._orders, strict=True)
        arrays = [a if o is None else jnp.transpose(a, np.argsort(o).tolist()) for a, o in pairs]
        for node, array in zip(self._program.read(), arrays, strict=True):
            observed.see(node, array)
        results = self._program.run(arrays, Numbers(self._sizes, free), call)
        computed = []
        for place, (result, layout) in enumerate(zip(results, self._layouts, strict=True)):
            if place in self._again:
                continue  # one tensor, as in torch: what is returned and also kept for backward
            if result is None or isinstance(result, bool | int | float):
                self._constants[place] = result
            elif not hasattr(result, "dtype"):
                raise CannotRecord("it returns a tensor whose shape depends on the values of another")
            else:
                computed.append(result if layout is None else layout.store(result))
        return computed, observed.holds()

    def _layout(self, node: Any) -> Layout | None:
        value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
        if not isinstance(value, torch.Tensor):
            return None
        sizes = [concrete(size, self._symbols) for size in (*value.shape, *value.stride())]
        known = [size for size in sizes if size is not None]
        count = value.dim() if len(known) == len(sizes) else 0  # the data decide a size: as it comes
        return Layout(known[:count], known[count:] if count else (), value.dtype)


def _abstract(array: Any) -> Any:
    """Return what a program is traced with: the same for a torch tensor's memory and for another program's result."""
    if array.dtype == np.int64:  # would become int32
        return array
    on_gpu = isinstance(array, jax.Array) and array.device.platform != "cpu"
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding if on_gpu else None)


def symbols_of(nodes: Sequence[torch.fx.Node], values: Sequence[Any]) -> dict[Any, Any]:
    """Return the values of the symbols that stand for sizes of the inputs."""
    found: dict[Any, Any] = {}

    def note(size: Any, number: Any) -> None:
        if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
            found[size.node.expr] = sympy.Integer(int(number))

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


def _shapes(arrays: Sequence[Any]) -> list[tuple[int, ...]]:
    return [tuple(array.shape) for array in arrays]


def _is_symbolic(tensor: torch.Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in tensor.shape)


def _is_finite(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or bool(value.isfinite().all())
