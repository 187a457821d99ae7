"""`from_torch`: convert a torch.nn.Module to a flax module with the same parameter names and the same results."""

import inspect
import logging
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from torch_bridge.datasets import to_numpy, to_torch
from torch_bridge.double_values import doubles_of, holds
from torch_bridge.layouts import Buffer, Carry, Frozen, key_of
from torch_bridge.lazy_array import to_host
from torch_bridge.lowering import wide_integers
from torch_bridge.lowering.dtypes import jax_dtype
from torch_bridge.records import Forward, Record
from torch_bridge.state_dict import state_dict

log = logging.getLogger(__name__)


def from_torch(
    module: torch.nn.Module, example_inputs: Any, modes: Sequence[str] = ("evaluation", "training")
) -> "ConvertedModule":
    """Convert the module to JAX: same outputs and gradients; parameters and buffers keep torch's names and layouts.

    Args:
        module: is not changed.
        example_inputs: what `module(...)` takes: one tensor, a tuple of positional arguments, or a dict of keyword
            arguments; numpy arrays work too. Their sizes may differ later, see `ConvertedModule.__call__`.
        modes: graphs to capture now; another one is captured at its first call.

    Raises:
        UnsupportedModel: which lists everything that cannot be converted.
    """
    module = unwrapped(module)
    record = Record(Forward(module))
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
        is captured anew.
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
