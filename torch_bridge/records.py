"""A torch module's graphs: one for each mode and, where sizes are fixed, for each shape."""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import _pytree as pytree

from jaxtrain.runtime.waits import Waits
from torch_bridge.capture.module_graph import module_graph
from torch_bridge.capture.module_hooks import refused_hooks
from torch_bridge.capture.traced import State
from torch_bridge.capture.unsupported import refused_at_sight, unsupported
from torch_bridge.datasets import is_dense, kind_of
from torch_bridge.lowering.errors import (
    ADVICE_HOOKS,
    ADVICE_READY,
    ADVICE_STATE,
    CannotRecord,
    NoLoss,
    Obstacle,
    UnsupportedModel,
    line_in,
    merge,
)
from torch_bridge.lowering.interpreter import Graph
from torch_bridge.lowering.python import assigned_buffers
from torch_bridge.lowering.python.effects import Changes
from torch_bridge.lowering.python.state import Watch
from torch_bridge.lowering.ready import device_of, unready
from torch_bridge.lowering.recording_lock import RECORDING_LOCK
from torch_bridge.lowering.table import Call
from torch_bridge.random_state import undrawn

log = logging.getLogger(__name__)

PREFIX = "wrapped_module."  # prefix of the module's names inside an entry


class Forward(torch.nn.Module):
    """A module's call, with its arguments in their original containers. Outputs that are neither tensors nor numbers,
    such as a key-value cache, become None: no loss or metric reads them. Dataclasses become dicts."""

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.wrapped_module = module

    def forward(self, args: tuple, kwargs: dict) -> Any:
        return self.wrapped_module(*args, **kwargs)


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
            log.info("%s is captured once more: %s", type(self.entry.wrapped_module).__name__, refusal)
        graph = self._record(leaves, spec, training)
        self._graphs[training].append((graph, spec))
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
        if parts := list(unready(self.entry)):
            raise UnsupportedModel(type(module).__name__, parts, ADVICE_READY)
        for tensor in (*self.entry.parameters(), *self.entry.buffers()):
            tensor.detach()  # fetches values that are awaited from the device
        examples = pytree.tree_unflatten([example_of(leaf) for leaf in leaves], spec)
        modes = {name: inner.training for name, inner in self.entry.named_modules()}
        before = Watch(self.entry)
        own_train = any(type(inner).train is not torch.nn.Module.train for inner in self.entry.modules())
        try:
            if not training:
                self.entry.eval()
            elif own_train or not module.training:  # a torch loop calls train(), which the user may have overridden
                self.entry.train()
            with self._effects() as changed, Waits(type(module).__name__, line_in).during("is captured"):
                graph = self._capture(examples, self._free_axes(leaves, spec), before)
            self.left |= changed
            return graph
        finally:
            before.restore()  # what the code has set, and a user's own train() besides the modes
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

    def _capture(self, examples: tuple, free: list[set[int]], watch: Watch) -> Graph:
        """Return the graph that TorchDynamo captures. Raises UnsupportedModel for code that is not one graph."""
        name = type(self.entry.wrapped_module).__name__
        if hooks := list(refused_hooks(self.entry)):
            raise UnsupportedModel(name, merge(hooks), ADVICE_HOOKS)
        device = device_of(self.entry)  # where a torch loop would have put the inputs
        inputs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), examples)
        if (refused := refused_at_sight(self.entry, inputs)) is not None:
            raise refused
        try:
            with RECORDING_LOCK, assigned_buffers.kept(self.entry), undrawn():
                graph, outside = module_graph(inputs, self._tensors(), free, watch)
        except NoLoss:
            raise
        except Exception as error:  # whatever the code raises
            watch.restore()
            refusal = unsupported(self.entry, inputs, error)
            raise refusal from refusal.__cause__ or error
        if watch.misfits:
            raise UnsupportedModel(name, [Obstacle(what) for what in dict.fromkeys(watch.misfits)], ADVICE_STATE)
        self.captured.update(outside)
        self.left.update(watch.names())
        self.left.note(watch.values())
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
                    if not is_dense(tensor):
                        what = f"{name.removeprefix(PREFIX)} is a {kind_of(tensor)} tensor"
                        raise CannotRecord(f"{what}, and compiled programs take dense ones: to_dense()")
                    if part is not None:
                        name, always = (self.parts or {})[part] + name.removeprefix(part), lasting
                    (names if always else written).setdefault(id(tensor), name.removeprefix(PREFIX))
        return State(self.entry, names, written, {id(p) for p in self.entry.parameters() if p.requires_grad})

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
