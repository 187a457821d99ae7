"""`from_torch`: convert a torch.nn.Module to a flax module with the same parameter names and the same results."""

import contextlib
import inspect
import logging
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch.utils import _pytree as pytree

from jaxtrain.runtime.waits import Waits
from torch_bridge.datasets import to_numpy, to_torch
from torch_bridge.double_values import doubles_of, holds
from torch_bridge.layouts import Buffer, Carry, Frozen, key_of
from torch_bridge.lazy_array import to_host
from torch_bridge.lowering import wide_integers
from torch_bridge.lowering.dtypes import jax_dtype
from torch_bridge.lowering.errors import line_in
from torch_bridge.lowering.interpreter import Graph, graph_of
from torch_bridge.lowering.python.effects import Changes
from torch_bridge.lowering.python.inputs import PythonInputs
from torch_bridge.lowering.python.state import Watch
from torch_bridge.lowering.recording import export as recording
from torch_bridge.lowering.recording.stand_ins import everywhere
from torch_bridge.lowering.structure import with_fields
from torch_bridge.lowering.table import Call
from torch_bridge.state_dict import state_dict

log = logging.getLogger(__name__)

PREFIX = "wrapped_module."  # prefix of the module's names inside an entry


def from_torch(
    module: torch.nn.Module, example_inputs: Any, modes: Sequence[str] = ("evaluation", "training")
) -> "ConvertedModule":
    """Convert the module to JAX: same outputs and gradients; parameters and buffers keep torch's names and layouts.

    Args:
        module: is not changed.
        example_inputs: what `module(...)` takes: one tensor, a tuple of positional arguments, or a dict of keyword
            arguments; numpy arrays work too. Their sizes may differ later, see `ConvertedModule.__call__`.
        modes: graphs to record now; another one is recorded at its first call.

    Raises:
        UnsupportedModel: which lists everything that cannot be converted.
    """
    module = unwrapped(module)
    record = Record(Forward(module, PythonInputs(module.forward, {"": module})))
    for mode in modes:
        record.graph(bind(module, *as_arguments(example_inputs)), training=mode == "training")
    return ConvertedModule(record, module)


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside torch.compile, DataParallel and DistributedDataParallel, which JAX does not use."""
    wrappers = torch._dynamo.OptimizedModule, torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel
    while isinstance(module, wrappers):
        module = module._orig_mod if isinstance(module, torch._dynamo.OptimizedModule) else module.module
    return module


def as_arguments(inputs: Any) -> tuple[tuple, dict[str, Any]]:
    """Split one tensor, a tuple or a dict into positional and keyword arguments."""
    several = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    return ((), dict(inputs)) if isinstance(inputs, Mapping) else (several, {})


def bind(module: torch.nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Order the arguments as in the forward's signature, so that f(x=1) and f(1) share a graph."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    return bound.args, bound.kwargs


class Forward(torch.nn.Module):
    """A module's call, with its arguments in their original containers. Outputs that are neither tensors nor numbers,
    such as a key-value cache, become None: no loss or metric reads them. Dataclasses become dicts."""

    def __init__(self, module: torch.nn.Module, reads: PythonInputs | None = None):
        super().__init__()
        self.wrapped_module, self.reads = module, reads

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
                recorded = recording.export(self.entry, examples, self.captured, self._read, self.left, graded=training)
            self.left |= changed
            return graph_of(recorded, PREFIX, self.parts)
        finally:
            before.restore()  # attributes that a user's own train() has set besides the modes
            for name, inner in self.entry.named_modules():
                inner.training = modes[name]

    def run(self, model: "ConvertedModule", inputs: tuple, rngs: Callable | None, valid: Any = None) -> Any:
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


class _Level(nnx.Module):
    """Parameters, buffers and submodules of one submodule, under their torch names."""


class ConvertedModule(nnx.Module):
    """A torch module that runs in JAX; made by `from_torch`.

    Its attributes are the torch module's parameters, buffers and submodules. Parameters shared in torch are shared
    here. Those with requires_grad=False are `Frozen`, so that gradients with respect to nnx.Param leave them out.
    """

    def __init__(
        self,
        record: Record,
        module: torch.nn.Module,
        further: Record | None = None,
        empty: bool = False,
        loss: torch.nn.Module | None = None,
    ):
        """further: another record whose graphs write buffers too. empty: use zeros for the weights, which are loaded
        later. loss: a loss module whose parameters are trained too, as the part `loss`."""
        self._record = record
        made: dict[int, nnx.Variable] = {}
        records = [record] if further is None else [record, further]
        changed = set().union(*(each.changed() for each in records))
        counters = set().union(*(each.counters() for each in records))
        _fill(self, module, made, changed, counters, empty)
        if loss is not None:
            self.loss = _Level()
            changed = further.changed() if further is not None else set()
            _fill(self.loss, loss, made, changed, counters, empty, ("loss",), only_changed=True)
            self.doubles.update({f"loss.{key}": value for key, value in doubles_of(_persistent(loss)).items()})
        self.doubles.update(doubles_of(_persistent(module)))

    @property
    def doubles(self) -> dict[str, np.ndarray]:
        """Return the values that float64 and complex128 tensors were given last, by torch name."""
        return self._record.doubles

    def __call__(self, *args: Any, rngs: Callable | None = None, valid: Any = None, **kwargs: Any) -> Any:
        """Compute the torch module's outputs, as arrays in dicts, tuples and lists.

        Takes the torch module's arguments. rngs: None for evaluation mode; otherwise training mode: every dropout calls
        `rngs()`, and buffers such as running statistics are updated. valid: bool [batch], the rows that count in batch
        statistics; all by default. Call it under jax.jit: one compilation per shape. A shape that no graph is valid for
        is recorded anew.
        """
        return self._record.run(
            self, bind(self._record.entry.get_submodule("wrapped_module"), args, kwargs), rngs, valid
        )

    def variables(self) -> dict[str, nnx.Variable]:
        """Return every parameter and buffer by its torch name."""
        found: dict[str, nnx.Variable] = {}
        _collect(self, (), found)
        return found


def _collect(level: nnx.Module, path: tuple, found: dict[str, nnx.Variable]) -> None:
    for name, value in vars(level).items():
        if isinstance(value, nnx.Variable):
            found[key_of((*path, name))] = value
        elif isinstance(value, _Level):
            _collect(value, (*path, name), found)


def _fill(
    level,
    module: torch.nn.Module,
    made: dict[int, nnx.Variable],
    changed: set[str],
    counters: set[str],
    empty: bool,
    path=(),
    only_changed: bool = False,
) -> None:
    """Set variables for a torch module on `level`. counters: buffers kept in 64 bits, as are those whose values need
    it. only_changed: leave out persistent buffers that no graph writes."""

    def share(name, tensor, kind):
        if id(tensor) not in made:
            array = to_numpy(tensor)
            wide = array.dtype == np.int64 and (key_of((*path, name)) in counters or not wide_integers.fits(array))
            zeros = empty and kind is not Carry
            if wide:
                value = wide_integers.as_wide(np.zeros_like(array) if zeros else array)
            else:
                value = jnp.zeros(array.shape, jax_dtype(array.dtype)) if zeros else jnp.array(array)
            made[id(tensor)] = kind(value)
        return made[id(tensor)]

    for name, parameter in module._parameters.items():
        if parameter is not None:
            kind = nnx.Param if parameter.requires_grad or empty else Frozen
            setattr(level, name, share(name, parameter, Buffer if key_of((*path, name)) in changed else kind))
    for name, buffer in module._buffers.items():
        if buffer is None:
            continue
        if name not in module._non_persistent_buffers_set:
            if not only_changed or key_of((*path, name)) in changed:
                setattr(level, name, share(name, buffer, Buffer))
        elif key_of((*path, name)) in changed:
            setattr(level, name, share(name, buffer, Carry))
    for name, child in module._modules.items():
        if child is not None and (any(True for _ in child.parameters()) or any(True for _ in child.buffers())):
            inner = _Level()
            _fill(inner, child, made, changed, counters, empty, (*path, name), only_changed)
            setattr(level, name, inner)


def state_of(module: torch.nn.Module) -> dict[str, np.ndarray]:
    """Return the torch module's parameters and persistent buffers by name; tied ones under each name."""
    return {name: to_numpy(value) for name, value in _persistent(module).items()}


def _persistent(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by path: the module's own `state_dict` may rename, omit or add some."""
    found: dict[str, torch.Tensor] = {}
    for path, inner in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        buffers = {
            key: tensor for key, tensor in inner._buffers.items() if key not in inner._non_persistent_buffers_set
        }
        found |= {prefix + key: value for key, value in (inner._parameters | buffers).items() if value is not None}
    return found


def write_back(model: nnx.Module, module: torch.nn.Module) -> torch.nn.Module:
    """Copy the model's parameters and buffers into the torch module, in place; keep its dtypes and devices. Buffers
    outside the state dict are copied too if the forward writes them.

    Returns the module. A loss module that was trained too (`TorchTask.trained_loss`) gets its own values. Raises
    RuntimeError, as torch does, if names or shapes differ.
    """
    state = {key: to_torch(array) for key, array in state_dict(model).items()}
    loss = getattr(getattr(model, "definition", None), "trained_loss", None)
    if loss is not None:
        own = {key: state.pop(key) for key in list(state) if key.startswith("loss.")}
        places = {f"loss.{key}": value for key, value in _persistent(loss).items()}
        _copy({key: value for key, value in own.items() if key in places}, places)
    places = _persistent(unwrapped(module))
    if state.keys() != places.keys():
        differing = sorted(state.keys() ^ places.keys())
        raise RuntimeError(f"{type(module).__name__} has other tensors than the model: {', '.join(differing[:8])}")
    _copy(state, places)
    owners = {"": unwrapped(module)} | ({"loss.": loss} if loss is not None else {})
    buffers = {
        prefix + key: buffer
        for prefix, owner in owners.items()
        for key, buffer in owner.named_buffers(remove_duplicate=False)
    }
    carried = {key_of(path): part for path, part in nnx.iter_graph(model) if isinstance(part, Carry)}
    _copy({key: to_torch(to_host(part.get_value())) for key, part in carried.items()}, buffers)
    return module


@torch.no_grad()
def _copy(state: Mapping[str, torch.Tensor], places: Mapping[str, torch.Tensor]) -> None:
    for key, value in state.items():
        if value.shape != places[key].shape:
            raise RuntimeError(
                f"{key} has shape {list(places[key].shape)} in the module, {list(value.shape)} in the model"
            )
        if not holds(places[key], value):
            places[key].copy_(value)


class _Function(types.ModuleType):
    """Module type that makes this module callable: `torch_bridge.from_torch(...)` calls the function of that name."""

    def __call__(self, *arguments: Any, **options: Any) -> ConvertedModule:
        return from_torch(*arguments, **options)


sys.modules[__name__].__class__ = _Function
