"""How the batch of the program being traced is spread over devices, for what must be written per device.

XLA's partitioner divides products and element-wise work by itself. A sort, or a kernel that is one call to it, it would
run on the whole batch everywhere; `parts` and `over_devices` say where the cuts are.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Axes = tuple[str | None, ...]  # what each axis of an array is: "batch", "heads" or neither
Spread = tuple[Mesh, tuple[tuple[str, tuple[str, ...]], ...]]
_spread: contextvars.ContextVar[Spread | None]
_spread = contextvars.ContextVar("spread", default=None)


@contextlib.contextmanager
def spread(mesh: Mesh | None, batch: tuple[str, ...] = (), heads: tuple[str, ...] = ()) -> Iterator[None]:
    """Say, inside, over which axes of the mesh a batch lies, and what a layer splits; None: on one device."""
    with resumed(None if mesh is None else (mesh, (("batch", batch), ("heads", heads)))):
        yield


def current() -> Spread | None:
    """Give what is in force, for a derivative that is traced after its function's scope has ended."""
    return _spread.get()


@contextlib.contextmanager
def resumed(found: Spread | None) -> Iterator[None]:
    """Put what `current` gave in force again, inside."""
    token = _spread.set(found)
    try:
        yield
    finally:
        _spread.reset(token)


def parts() -> int:
    """Count the pieces that the batch is cut into."""
    return 1 if _spread.get() is None else _size("batch")


def in_parts(x: jax.Array) -> jax.Array:
    """Place x's first axis over the devices, an equal number of entries on each."""
    if parts() == 1:
        return x
    mesh, axes = _mesh_and_axes()
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(axes["batch"])))


def over_devices(function: Callable, arrays: Sequence[Any], kinds: Sequence[Axes], result: Axes) -> Any:
    """Run function(*arrays) on every device's part: kinds says which axes of each array are batch or heads (one of
    length 1 is everywhere), result the same of what it gives. Called as it is on one device, or where the devices do
    not divide an axis."""
    spread = _spread.get()
    if spread is None or math.prod(spread[0].shape.values()) == 1:
        return function(*arrays)
    mesh, axes = _mesh_and_axes()
    sizes = {kind: {x.shape[a] for x, names in zip(arrays, kinds, strict=True) for a, name in enumerate(names)
                    if name == kind and x.shape[a] > 1} for kind in axes}  # fmt: skip
    cut = {kind for kind, found in sizes.items() if axes[kind] and all(n % _size(kind) == 0 for n in found)}
    if "batch" not in cut:
        return function(*arrays)
    place = lambda names, shape=None: P(
        *(axes[name] if name in cut and (shape is None or shape[a] > 1) else None for a, name in enumerate(names))
    )
    manual = frozenset(axis for kind in cut for axis in axes[kind])
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=tuple(place(names, x.shape) for x, names in zip(arrays, kinds, strict=True)),
        out_specs=place(result),
        axis_names=manual,
        check_vma=False,
    )(*arrays)


def _mesh_and_axes() -> tuple[Mesh, dict[str, tuple[str, ...]]]:
    spread = _spread.get()
    assert spread is not None  # callers have asked parts()
    mesh, axes = spread
    return mesh, dict(axes)


def _size(kind: str) -> int:
    mesh, axes = _mesh_and_axes()
    return math.prod(mesh.shape[axis] for axis in axes[kind])
