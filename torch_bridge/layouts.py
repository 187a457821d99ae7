"""How the variables of a flax module are named and typed in a torch state dict.

Layers of `jaxtrain.nn` keep torch's own layouts (Linear [out, in], Conv [out, in, *kernel]) and attribute names, so
crossing the bridge moves no axis: a variable's path, joined by dots, is its key. What remains is the order in which
torch registers things, tied weights under every name, and the integer width.
"""

from collections.abc import Iterator

import jax
import numpy as np
from flax import nnx


class Buffer(nnx.Variable):
    """A persistent torch buffer: saved and exported, not trained (running statistics, usage averages)."""


class Carry(nnx.Variable):
    """State that a run must carry on but torch never sees (ring buffers, counters): saved, not exported."""


def key_of(path: tuple) -> str:
    """`("layers", 0, "weight")` -> `"layers.0.weight"`."""
    return ".".join(map(str, path))


def named_variables(module: nnx.Module, prefix: tuple = ()) -> Iterator[tuple[str, nnx.Variable]]:
    """Parameters and buffers as `torch.nn.Module.state_dict` lists them: own parameters, own buffers, then children,
    each in the order of their assignment; a tied variable appears under each of its names."""
    members = list(_members(module))
    for kind in (nnx.Param, (Buffer, nnx.BatchStat)):
        for name, value in members:
            if isinstance(value, kind):
                yield key_of((*prefix, name)), value
    for name, value in members:
        if isinstance(value, nnx.Pytree):
            yield from named_variables(value, (*prefix, name))


def _members(module) -> Iterator[tuple]:
    if isinstance(module, nnx.List):
        yield from enumerate(module)
        return
    for name, value in vars(module).items():
        if not name.startswith("_pytree__"):
            yield name, value


def parameter_order(module: nnx.Module) -> list[str]:
    """Keys in the order of `torch.nn.Module.parameters()`, tied parameters once, at their first name.

    torch optimizers number their state by this order.
    """
    seen: set[int] = set()
    keys = []
    for key, variable in _parameters(module, ()):
        if id(variable) not in seen:
            seen.add(id(variable))
            keys.append(key)
    return keys


def _parameters(module, prefix: tuple):
    members = list(_members(module))
    for name, value in members:
        if isinstance(value, nnx.Param):
            yield key_of((*prefix, name)), value
    for name, value in members:
        if isinstance(value, nnx.Pytree):
            yield from _parameters(value, (*prefix, name))


def to_torch_dtype(array: np.ndarray) -> np.ndarray:
    """JAX counts in int32, torch in int64."""
    return array.astype(np.int64) if array.dtype == np.int32 else array


def from_torch_dtype(array: np.ndarray, wanted: np.dtype) -> np.ndarray:
    """The array in the module's dtype. Raises ValueError where that would turn numbers into other kinds of numbers."""
    kind = "f" if jax.numpy.issubdtype(array.dtype, jax.numpy.floating) else np.dtype(array.dtype).kind
    wanted_kind = "f" if jax.numpy.issubdtype(wanted, jax.numpy.floating) else np.dtype(wanted).kind
    if kind != wanted_kind and {kind, wanted_kind} != {"i", "u"}:
        raise ValueError(f"it holds {array.dtype}, the model wants {wanted}")
    return np.asarray(array).astype(wanted, copy=False)
