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

Axes = tuple[str | None, ...]  # what each axis of an array is: "batch", "sequence", "heads" or none of these
Spread = tuple[Mesh, tuple[tuple[str, tuple[str, ...]], ...]]
_spread: contextvars.ContextVar[Spread | None]
_spread = contextvars.ContextVar("spread", default=None)


@contextlib.contextmanager
def spread(
    mesh: Mesh | None, batch: tuple[str, ...] = (), heads: tuple[str, ...] = (), sequence: tuple[str, ...] = ()
) -> Iterator[None]:
    """Say, inside, over which axes of the mesh a batch lies, what a layer splits, and over which the tokens of a sample
    lie; None: on one device."""
    with resumed(None if mesh is None else (mesh, (("batch", batch), ("heads", heads), ("sequence", sequence)))):
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


def parts(kind: str = "batch") -> int:
    """Count the pieces that a batch is cut into, or the tokens of a sample ("sequence")."""
    return 1 if _spread.get() is None else _size(kind)


def in_parts(x: jax.Array) -> jax.Array:
    """Place x's first axis over the devices that hold rows or tokens, an equal number of entries on each."""
    if parts() * parts("sequence") == 1:
        return x
    mesh, axes = _mesh_and_axes()
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P((*axes["batch"], *axes["sequence"]))))


def apart(x: jax.Array, batch: int, sequence: int) -> jax.Array:
    """Cut x [sample, token, ...] into what each device holds: [batch * sequence, entries, ...]."""
    samples, tokens, *inner = x.shape
    blocks = x.reshape(batch, samples // batch, sequence, tokens // sequence, *inner)
    return in_parts(blocks.swapaxes(1, 2).reshape(batch * sequence, -1, *inner))


def split_tokens(x: jax.Array) -> jax.Array:
    """Place x [batch, token, ...] with the tokens of each sample over the devices of `shard.sequence`. Traced."""
    if parts("sequence") == 1:
        return x
    mesh, axes = _mesh_and_axes()
    rows = None if len(x) % parts() else axes["batch"]
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(rows, axes["sequence"])))


def over_devices(function: Callable, arrays: Sequence[Any], kinds: Sequence[Axes], result: Axes) -> Any:
    """Run function(*arrays) on every device's part: kinds says which axes of each array are batch, sequence or heads
    (one of length 1 is everywhere), result the same of what it gives. An axis that the devices do not divide is whole
    on each. Called as it is where none is cut."""
    spread = _spread.get()
    if spread is None or math.prod(spread[0].shape.values()) == 1:
        return function(*arrays)
    mesh, axes = _mesh_and_axes()
    sizes = {kind: {x.shape[a] for x, names in zip(arrays, kinds, strict=True) for a, name in enumerate(names)
                    if name == kind and x.shape[a] > 1} for kind in axes}  # fmt: skip
    cut = {kind for kind, found in sizes.items() if axes[kind] and found and all(n % _size(kind) == 0 for n in found)}
    if not cut:
        return function(*arrays)
    place = lambda names, shape=None: P(
        *(axes[name] if name in cut and (shape is None or shape[a] > 1) else None for a, name in enumerate(names))
    )
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=tuple(place(names, x.shape) for x, names in zip(arrays, kinds, strict=True)),
        out_specs=place(result),
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
