"""How the variables of a flax module are named and typed in a torch state dict.

Layers of `jaxtrain.nn` keep torch's own layouts (Linear [out, in], Conv [out, in, *kernel]) and attribute names, so
crossing the bridge moves no axis: a variable's path, joined by dots, is its key. What remains is the order in which
torch registers things, tied weights under every name, and the integer width.
"""

from collections.abc import Callable, Iterator

import jax
import numpy as np
from flax import nnx


class Buffer(nnx.Variable):
    """A persistent torch buffer: saved and exported, not trained (running statistics, usage averages)."""


class Frozen(nnx.Variable):
    """A parameter whose requires_grad was False in torch: exported as a parameter, no `nnx.Param`, so no gradient."""


class Carry(nnx.Variable):
    """State that a run must carry on but torch never sees (ring buffers, counters): saved, not exported.

    `Carry(value, stays_finite=True)` promises that a step leaves no NaN in it, whatever the loss. Then a skipped step
    does not take back what it wrote, which would copy all of it at every step.
    """


def key_of(path: tuple) -> str:
    """`("layers", 0, "weight")` -> `"layers.0.weight"`."""
    return ".".join(map(str, path))


def named_variables(module: nnx.Pytree, prefix: tuple = ()) -> Iterator[tuple[str, nnx.Variable]]:
    """Parameters and buffers as `torch.nn.Module.state_dict` lists them: own parameters, own buffers, then children,
    each in the order of their assignment; a tied variable appears under each of its names."""
    members = list(children(module))
    for kind in ((nnx.Param, Frozen), (Buffer, nnx.BatchStat)):
        for name, value in members:
            if isinstance(value, kind):
                yield key_of((*prefix, name)), value
    for name, value in members:
        if isinstance(value, nnx.Pytree):
            yield from named_variables(value, (*prefix, name))


def children(module: nnx.Pytree) -> Iterator[tuple]:
    """(name, value) of every attribute, in the order of assignment."""
    if isinstance(module, nnx.List):
        yield from enumerate(module)
        return
    for name, value in vars(module).items():
        if not name.startswith("_pytree__"):
            yield name, value


def attribute_order(module: nnx.Pytree) -> tuple:
    """The order in which attributes were assigned, which torch registers by: (name, order inside) for each.

    Splitting and merging a module, and everything that does so (jit, eval_shape), sorts them by name.
    """
    return tuple(
        (name, attribute_order(value) if isinstance(value, nnx.Pytree) else ()) for name, value in children(module)
    )


def restore_order(module: nnx.Module, order: tuple) -> None:
    """Give a merged module the `attribute_order` of the original back."""
    members = dict(children(module))
    for name, inner in order:
        if inner and isinstance(members.get(name), nnx.Pytree):
            restore_order(members[name], inner)
    if not isinstance(module, nnx.List):
        own = vars(module)
        for name in [name for name, _ in order if name in own] + [name for name in own if name not in dict(order)]:
            own[name] = own.pop(name)


def abstract(build: Callable[[], nnx.Module]) -> nnx.Module:
    """`nnx.eval_shape(build)`, attributes in the order in which `build` assigns them."""
    orders = []

    def traced() -> nnx.Module:
        module = build()
        orders.append(attribute_order(module))
        return module

    module = nnx.eval_shape(traced)
    restore_order(module, orders[-1])
    return module


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


def first_names(module: nnx.Module) -> dict[str, str]:
    """Every key of a parameter or buffer -> the first key of the same variable in torch's order; tied ones meet."""
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
    """JAX counts in int32, torch in int64."""
    return array.astype(np.int64) if array.dtype == np.int32 else array


def from_torch_dtype(array: np.ndarray, wanted: np.dtype) -> np.ndarray:
    """The array in the module's dtype. Raises ValueError where that would turn numbers into other kinds of numbers."""
    kind = "f" if jax.numpy.issubdtype(array.dtype, jax.numpy.floating) else np.dtype(array.dtype).kind
    wanted_kind = "f" if jax.numpy.issubdtype(wanted, jax.numpy.floating) else np.dtype(wanted).kind
    if kind != wanted_kind and {kind, wanted_kind} != {"i", "u"}:
        raise ValueError(f"it holds {array.dtype}, the model wants {wanted}")
    return np.asarray(array).astype(wanted, copy=False)
