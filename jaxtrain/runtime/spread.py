"""Describe how the batch of the traced program is spread over devices, for code that must be written per device.

XLA's partitioner divides products and element-wise operations by itself. But it would run a sort, or a custom kernel
call, on the whole batch on every device; `parts` and `over_devices` divide those.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Axes = tuple[str | None, ...]  # the kind of each axis of an array: "batch", "sequence", "heads", or None
Spread = tuple[Mesh, tuple[tuple[str, tuple[str, ...]], ...]]
_spread: contextvars.ContextVar[Spread | None]
_spread = contextvars.ContextVar("spread", default=None)


@contextlib.contextmanager
def spread(
    mesh: Mesh | None, batch: tuple[str, ...] = (), heads: tuple[str, ...] = (), sequence: tuple[str, ...] = ()
) -> Iterator[None]:
    """Set, for this context, the mesh axes that split the batch, a layer's heads, and the tokens of a sample.

    mesh None: a single device.
    """
    with resumed(None if mesh is None else (mesh, (("batch", batch), ("heads", heads), ("sequence", sequence)))):
        yield


def current() -> Spread | None:
    """Return the current setting, for a derivative that is traced after its function's context has ended."""
    return _spread.get()


@contextlib.contextmanager
def resumed(found: Spread | None) -> Iterator[None]:
    """Restore, for this context, a setting returned by `current`."""
    token = _spread.set(found)
    try:
        yield
    finally:
        _spread.reset(token)


def parts(kind: str = "batch") -> int:
    """Return the number of pieces that a batch, or the tokens of a sample ("sequence"), is split into."""
    return 1 if _spread.get() is None else _size(kind)


def in_parts(x: jax.Array) -> jax.Array:
    """Place x's first axis over the devices that hold rows or tokens, an equal number of entries on each."""
    if parts() * parts("sequence") == 1:
        return x
    mesh, axes = _mesh_and_axes()
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P((*axes["batch"], *axes["sequence"]))))


def apart(x: jax.Array, batch: int, sequence: int) -> jax.Array:
    """Cut x [sample, token, ...] into the pieces of the devices: [batch * sequence, entries, ...]."""
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
    """Run function(*arrays) on every device's part of the arrays.

    kinds: which axes of each array are batch, sequence or heads; an axis of length 1 is replicated. result: the same
    for the function's result. An axis whose length the devices do not divide is replicated. If no axis is split, the
    function is called directly.
    """
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
