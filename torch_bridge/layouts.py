"""Names and dtypes of a flax module's variables in a torch state dict.

Layers of `jaxtrain.nn` use torch's own layouts (Linear [out, in], Conv [out, in, *kernel]) and attribute names, so
conversion moves no axis: a variable's path, joined by dots, is its key. What remains is the order in which torch
registers parameters and buffers, tied weights under every name, and the integer width.
"""

from collections.abc import Callable, Iterator

import jax
import numpy as np
from flax import nnx


class Buffer(nnx.Variable):
    """A persistent torch buffer: saved and exported, not trained (running statistics, usage averages)."""


class Frozen(nnx.Variable):
    """A parameter with requires_grad=False in torch: exported as a parameter, but not an nnx.Param, so without
    gradient."""


class Carry(nnx.Variable):
    """State that a run must keep but torch never sees (ring buffers, counters): saved, not exported.

    `Carry(value, stays_finite=True)` promises that a step leaves no NaN in it, whatever the loss. A skipped step then
    does not undo its writes to it, which would copy the whole state at every step.
    """


def key_of(path: tuple) -> str:
    """Join a path by dots: `("layers", 0, "weight")` -> `"layers.0.weight"`."""
    return ".".join(map(str, path))


def named_variables(module: nnx.Pytree, prefix: tuple = ()) -> Iterator[tuple[str, nnx.Variable]]:
    """Yield (key, variable) as `torch.nn.Module.state_dict` lists them: own parameters, own buffers, then children,
    each in the order of assignment; a tied variable under each of its names."""
    members = list(children(module))
    for kind in ((nnx.Param, Frozen), (Buffer, nnx.BatchStat)):
        for name, value in members:
            if isinstance(value, kind):
                yield key_of((*prefix, name)), value
    for name, value in members:
        if isinstance(value, nnx.Pytree):
            yield from named_variables(value, (*prefix, name))


def children(module: nnx.Pytree) -> Iterator[tuple]:
    """Yield (name, value) of every attribute, in the order of assignment."""
    if isinstance(module, nnx.List):
        yield from enumerate(module)
        return
    for name, value in vars(module).items():
        if not name.startswith("_pytree__"):
            yield name, value


def attribute_order(module: nnx.Pytree) -> tuple:
    """Return (name, order inside its value) of every attribute in the order of assignment, by which torch registers.

    Splitting and merging a module, as jit and eval_shape do, sorts attributes by name.
    """
    return tuple(
        (name, attribute_order(value) if isinstance(value, nnx.Pytree) else ()) for name, value in children(module)
    )


def restore_order(module: nnx.Module, order: tuple) -> None:
    """Restore the original's `attribute_order` in a merged module."""
    members = dict(children(module))
    for name, inner in order:
        if inner and isinstance(members.get(name), nnx.Pytree):
            restore_order(members[name], inner)
    if not isinstance(module, nnx.List):
        own = vars(module)
        for name in [name for name, _ in order if name in own] + [name for name in own if name not in dict(order)]:
            own[name] = own.pop(name)


def abstract(build: Callable[[], nnx.Module]) -> nnx.Module:
    """Return `nnx.eval_shape(build)` with attributes in the order in which `build` assigns them."""
    orders = []

    def traced() -> nnx.Module:
        module = build()
        orders.append(attribute_order(module))
        return module

    module = nnx.eval_shape(traced)
    restore_order(module, orders[-1])
    return module


def parameter_order(module: nnx.Module) -> list[str]:
    """Return keys in the order of `torch.nn.Module.parameters()`; a tied parameter once, under its first name.

    torch optimizers number their state by this order.
    """
    seen: set[int] = set()
    keys = []
    for key, variable in _parameters(module, ()):
        if id(variable) not in seen:
            seen.add(id(variable))
            keys.append(key)
    return keys


def first_names(module: nnx.Module) -> dict[str, str]:
    """Map every key of a parameter or buffer to its variable's first key in torch's order; tied keys map to the
    same."""
    first: dict[int, str] = {}
    return {key: first.setdefault(id(variable), key) for key, variable in named_variables(module)}


def _parameters(module, prefix: tuple):
    members = list(children(module))
    for name, value in members:
        if isinstance(value, (nnx.Param, Frozen)):
            yield key_of((*prefix, name)), value
    for name, value in members:
        if isinstance(value, nnx.Pytree):
            yield from _parameters(value, (*prefix, name))


def to_torch_dtype(array: np.ndarray) -> np.ndarray:
    """Convert int32, JAX's default integer, to int64, torch's."""
    return array.astype(np.int64) if array.dtype == np.int32 else array


def from_torch_dtype(array: np.ndarray, wanted: np.dtype) -> np.ndarray:
    """Convert the array to the module's dtype. Raises ValueError if the kind of number would change, such as float to
    integer."""
    kind = "f" if jax.numpy.issubdtype(array.dtype, jax.numpy.floating) else np.dtype(array.dtype).kind
    wanted_kind = "f" if jax.numpy.issubdtype(wanted, jax.numpy.floating) else np.dtype(wanted).kind
    if kind != wanted_kind and {kind, wanted_kind} != {"i", "u"}:
        raise ValueError(f"it holds {array.dtype}, the model wants {wanted}")
    return np.asarray(array).astype(wanted, copy=False)
