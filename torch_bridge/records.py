"""A torch module's graphs: one for each mode and, where sizes are fixed, for each shape."""

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import _pytree as pytree

from jaxtrain.errors import UserError
from jaxtrain.runtime.waits import Waits
from torch_bridge.capture.module_graph import State, module_graph
from torch_bridge.lowering.errors import NoLoss, line_in
from torch_bridge.lowering.interpreter import Graph, graph_of
from torch_bridge.lowering.python import assigned_buffers
from torch_bridge.lowering.python.effects import Changes
from torch_bridge.lowering.python.inputs import PythonInputs
from torch_bridge.lowering.python.state import Watch
from torch_bridge.lowering.recording import export as recording
from torch_bridge.lowering.recording.stand_ins import everywhere
from torch_bridge.lowering.recording_lock import RECORDING_LOCK
from torch_bridge.lowering.structure import with_fields
from torch_bridge.lowering.table import Call
from torch_bridge.random_state import undrawn

log = logging.getLogger(__name__)

CAPTURE = "JAXTRAIN_CAPTURE"  # environment variable: "dynamo" lets TorchDynamo capture modules first
PREFIX = "wrapped_module."  # prefix of the module's names inside an entry


class Forward(torch.nn.Module):
    """A module's call, with its arguments in their original containers. Outputs that are neither tensors nor numbers,
    such as a key-value cache, become None: no loss or metric reads them. Dataclasses become dicts."""

    def __init__(self, module: torch.nn.Module, reads: PythonInputs | None = None):
        super().__init__()
        self.wrapped_module, self.reads = module, reads

    def call(self, inputs: tuple) -> Any:
        """Call the module; this is what Dynamo captures."""
        return self.wrapped_module(*inputs[0], **inputs[1])

    def forward(self, args: tuple, kwargs: dict):
        with everywhere(self.reads):
            outputs = with_fields(self.wrapped_module(*args, **kwargs))
        return pytree.tree_map(lambda leaf: leaf if isinstance(leaf, _KNOWN) else self.other_output(leaf), outputs)

    def other_output(self, leaf: Any) -> None:
        """Return what takes the place of an output that is neither a tensor nor a number."""


_KNOWN = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, bool, int, float, complex, str, bytes)


class Record:
    """A torch module and its graphs: one per mode and, where sizes are fixed, per shape.

    entry: the recorded module, which wraps `entry.wrapped_module`; the flax module has its parameters and buffers.
    Static data of a ConvertedModule: compared by identity.
    """

    def __init__(
        self,
        entry: torch.nn.Module,
        parts: Mapping[str, str] | None = None,
        effects: Callable[[], contextlib.AbstractContextManager[set[str]]] = lambda: contextlib.nullcontext(set()),
    ):
        """parts: see `graph_of`. effects: see `PythonInputs.effects`, for what the entry reads."""
        self.entry, self.parts, self._effects = entry, parts, effects
        self._graphs: dict[bool, list[tuple[Graph, Any]]] = {False: [], True: []}
        self._read: dict[str, str] = {}
        self._shapes: dict[Any, list[list[tuple[int, ...]]]] = {}  # of the inputs of each graph, by their structure
        self.doubles: dict[str, np.ndarray] = {}  # values of float64 and complex128 tensors, which JAX has rounded
        self.captured: dict[int, torch.Tensor] = {}  # tensors from outside the module that the graphs hold as constants
        self.left = Changes()  # Python attributes that a torch call changes and a compiled one does not

    def graph(self, inputs: tuple, training: bool) -> tuple[Graph, list[Any]]:
        """Return the graph that is valid for these inputs of the entry, and their leaves. Record it if there is none
        yet."""
        leaves, spec = pytree.tree_flatten(inputs)
        refusal = None
        for graph, known in self._graphs[training]:
            refusal = "its inputs are arranged otherwise" if known != spec else graph.refusal(leaves)
            if refusal is None:
                return graph, leaves
        if refusal is not None:
            log.info("%s is recorded once more: %s", type(self.entry.wrapped_module).__name__, refusal)
        graph = self._record(leaves, spec, training)
        self._graphs[training].append((graph, spec))
        recording.check_read(self.entry, self._read, self.changed())
        return graph, leaves

    def holds(self, inputs: tuple, training: bool) -> bool:
        """Return True if an existing graph is valid for these inputs of the entry."""
        leaves, spec = pytree.tree_flatten(inputs)
        graphs = self._graphs[training]
        return any(known == spec and graph.refusal(leaves) is None for graph, known in graphs)

    def check_indices(self, inputs: tuple, training: bool) -> bool:
        """Raise IndexOutOfBounds for inputs in host memory that torch would refuse; return False if no graph is valid
        for them yet."""
        leaves, spec = pytree.tree_flatten(inputs)
        for graph, known in self._graphs[training]:
            if known == spec and graph.refusal(leaves) is None:
                graph.check_indices(leaves)
                return True
        return False

    def graphs(self) -> list[Graph]:
        return [graph for graphs in self._graphs.values() for graph, _ in graphs]

    def changed(self) -> set[str]:
        """Return the names of buffers that any graph writes."""
        return {name for graph in self.graphs() for name in graph.changed}

    def counters(self) -> set[str]:
        """Return the names of int64 buffers that any graph may grow beyond 32 bits."""
        return {name for graph in self.graphs() for name in graph.counters}

    def _record(self, leaves, spec, training: bool) -> Graph:
        module = self.entry.wrapped_module
        examples = pytree.tree_unflatten([example_of(leaf) for leaf in leaves], spec)
        modes = {name: inner.training for name, inner in self.entry.named_modules()}
        before = Watch(self.entry)
        own_train = any(type(inner).train is not torch.nn.Module.train for inner in self.entry.modules())
        try:
            if not training:
                self.entry.eval()
            elif own_train or not module.training:  # a torch loop calls train(), which the user may have overridden
                self.entry.train()
            with self._effects() as changed, Waits(type(module).__name__, line_in).during("is recorded"):
                graph = self._captured(examples, self._free_axes(leaves, spec)) if _captures() else None
                if graph is None:
                    recorded = recording.export(
                        self.entry, examples, self.captured, self._read, self.left, graded=training
                    )
                    graph = graph_of(recorded, PREFIX, self.parts)
            self.left |= changed
            return graph
        finally:
            before.restore()  # attributes that a user's own train() has set besides the modes
            for name, inner in self.entry.named_modules():
                inner.training = modes[name]

    def _free_axes(self, leaves: Sequence[Any], spec: Any) -> list[set[int]]:
        """Return the axes of each leaf whose sizes the next graph leaves open: rows, and those that have changed from
        one record to the next, but for heights and widths, as arithmetic on these can take torch minutes."""
        shapes = [tuple(getattr(leaf, "shape", ())) for leaf in leaves]
        known = self._shapes.setdefault(spec, [])
        known.append(shapes)
        free = []
        for place, shape in enumerate(shapes):
            axes = range(len(shape) if len(shape) < 4 else 1)
            sizes = [{each[place][axis] for each in known if len(each[place]) == len(shape)} for axis in axes]
            free.append({axis for axis in axes if axis == 0 or len(sizes[axis]) > 1})
        return free

    def _captured(self, examples: tuple, free: list[set[int]]) -> Graph | None:
        """Return the graph that TorchDynamo captures; None if the code is recorded instead."""
        watch = Watch(self.entry)
        inputs = recording.checked(self.entry, examples)
        try:
            with RECORDING_LOCK, assigned_buffers.kept(self.entry), undrawn():
                call = type(self.entry).call
                graph, outside = module_graph(call, self.entry, inputs, self._tensors(), free)
        except NoLoss:
            raise
        except Exception as error:  # whatever the code raises: what records it tells of it
            log.info("%s is recorded: %s", type(self.entry.wrapped_module).__name__, str(error).partition("\n")[0])
            watch.restore()
            return None
        self.captured.update(outside)
        return graph

    def _tensors(self) -> State:
        """Return the tensors of the entry that are a graph's state, as `graph_of` has them."""
        names: dict[int, str] = {}
        written: dict[int, str] = {}
        for path, inner in self.entry.named_modules():
            for tensors, lasting in ((inner._parameters, True), (inner._buffers, False)):
                for key, tensor in tensors.items():
                    name = f"{path}.{key}"
                    always = lasting or key not in inner._non_persistent_buffers_set
                    part = next((old for old in self.parts or {} if name.startswith(old)), None)
                    if tensor is None or not (name.startswith(PREFIX) or part):
                        continue
                    if part is not None:
                        name, always = (self.parts or {})[part] + name.removeprefix(part), lasting
                    (names if always else written).setdefault(id(tensor), name.removeprefix(PREFIX))
        return State(names, written, {id(p) for p in self.entry.parameters() if p.requires_grad})

    def run(self, model: Any, inputs: tuple, rngs: Callable | None, valid: Any = None) -> Any:
        """Run the graph for these inputs with the model's variables; write the buffers that it changes."""
        graph, leaves = self.graph(inputs, training=rngs is not None)
        variables = model.variables()
        state = {name: as_torchs(variables[name].get_value()) for name in graph.state}
        outputs, changed = graph.run(state, leaves, Call(rngs, valid))
        for name, value in changed.items():
            dtype = variables[name].dtype
            variables[name].set_value(value if dtype == np.int64 else jnp.asarray(value, dtype))
        return outputs


def _captures() -> bool:
    """Return True if the user has chosen TorchDynamo's capture. Raises UserError for another word."""
    chosen = os.environ.get(CAPTURE, "")
    if chosen not in ("", "dynamo"):
        raise UserError(f"{CAPTURE}={chosen}: no such capture; set it to dynamo, or leave it out")
    return bool(chosen)


def as_torchs(value: jax.Array) -> jax.Array:
    """Return the value unchanged; a complex one gets torch's gradient, the conjugate of JAX's: the direction of
    steepest ascent."""
    return _torch_slope(value) if jnp.iscomplexobj(value) else value


@jax.custom_vjp
def _torch_slope(value):
    return value


_torch_slope.defvjp(lambda value: (value, None), lambda _, slope: (jnp.conj(slope),))


def example_of(leaf: Any) -> Any:
    """Return a tensor to record with: its shape and dtype matter, its values do not. Zeros hide no branch, as torch
    refuses those on values, and integer zeros are valid indices."""
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().contiguous()
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
        kind = "int64" if jnp.issubdtype(leaf.dtype, jnp.signedinteger) else str(leaf.dtype)
        return torch.zeros(tuple(leaf.shape), dtype=getattr(torch, "bool" if kind == "bool_" else kind))
    return leaf
