"""One mesh, and where every array of a run lives on it."""

import contextlib
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.errors import UserError
from jaxtrain.runtime.devices import all_devices
from jaxtrain.runtime.spread import spread

BATCH_AXES = ("replica", "fsdp")  # a batch is split over both
PIECES = ("fsdp", "sequence")  # parameters and moments that are kept in pieces are split over both


@dataclasses.dataclass(frozen=True)
class Layout:
    """The mesh (replica, fsdp, sequence, tensor) and the rules that place arrays on it."""

    mesh: Mesh
    strategy: str
    rules: Mapping[str, tuple]

    @property
    def batch_devices(self) -> int:
        """Into how many pieces a batch is split."""
        return self.mesh.shape["replica"] * self.mesh.shape["fsdp"]

    @property
    def shards(self) -> int:
        """Into how many pieces fsdp splits an array: devices that hold other tokens of a sample hold other pieces."""
        return self.mesh.shape["fsdp"] * self.mesh.shape["sequence"]

    @property
    def per_device(self) -> bool:
        """Return True if each device computes its own rows, as in DistributedDataParallel."""
        return self.strategy == "ddp_local"

    @property
    def whole_on_gpus(self) -> bool:
        """Return True if every device is a GPU and holds all of every array that the optimizer updates."""
        whole = self.mesh.size == 1 or (self.strategy in ("ddp", "ddp_local") and self.mesh.shape["tensor"] == 1)
        return whole and self.mesh.devices.flat[0].platform == "gpu"

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, P())

    def spread(self) -> contextlib.AbstractContextManager:
        """Tell layers that are written per device, inside, where a batch is cut. Traced."""
        whole = self.per_device or self.mesh.size == 1
        return spread(None if whole else self.mesh, BATCH_AXES, ("tensor",), ("sequence",))

    def batch(self, leading: int = 0) -> NamedSharding:
        """Rows over the batch axes; `leading` axes (steps per call, accumulation) before them stay whole."""
        return NamedSharding(self.mesh, P(*(None,) * leading, BATCH_AXES))

    def rows(self, size: int, leading: int = 0) -> NamedSharding:
        """As `batch`; a batch of a size that does not divide over the batch axes is held by every device."""
        return self.replicated if size % self.batch_devices else self.batch(leading)

    def parameter(self, key: str, shape: tuple[int, ...]) -> NamedSharding:
        """Where a parameter is kept between steps."""
        return self._place(key, shape, split=self.strategy in ("fsdp", "hsdp"))

    def moment(self, key: str, shape: tuple[int, ...]) -> NamedSharding:
        """Where the optimizer's arrays of a parameter's shape are kept; gradients are reduced to the same place."""
        return self._place(key, shape, split=self.strategy in ("fsdp", "hsdp", "shard_grad_op"))

    @property
    def gathers(self) -> bool:
        """Return True if parameters are stored sharded and gathered for use."""
        return self.strategy in ("fsdp", "hsdp") and self.shards > 1

    def is_split(self, key: str, shape: tuple[int, ...]) -> bool:
        """Return True if a parameter is kept in pieces that are gathered for use."""
        return PIECES in self.parameter(key, shape).spec

    def gather(self, params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Whole parameters for one forward or backward pass; their gradients come back in pieces. Traced.

        Source: Zhao et al. 2023 (FSDP), full sharding.
        """
        if not self.gathers:
            return dict(params)
        return {key: self._gather(value, self.parameter(key, value.shape)) for key, value in params.items()}

    def _gather(self, value: jax.Array, kept: NamedSharding) -> jax.Array:
        whole = NamedSharding(self.mesh, P(*(None if axis == PIECES else axis for axis in kept.spec)))

        together = lambda x: jax.lax.with_sharding_constraint(x, whole)
        apart = lambda _, g: (jax.lax.with_sharding_constraint(g, kept),)
        gather = jax.custom_vjp(together)
        gather.defvjp(lambda x: (together(x), None), apart)
        return gather(jax.lax.optimization_barrier(value))  # XLA would gather first and cast to bf16 after

    def scatter(self, grads: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Gradients where the optimizer keeps its moments. Traced."""
        if self.strategy != "shard_grad_op":
            return dict(grads)
        place = lambda key, value: jax.lax.with_sharding_constraint(value, self.moment(key, value.shape))
        return {key: place(key, value) for key, value in grads.items()}

    def _place(self, key: str, shape: tuple[int, ...], split: bool) -> NamedSharding:
        spec: list[Any] = [None] * len(shape)
        for pattern, axes in self.rules.items():
            if self.mesh.shape["tensor"] > 1 and re.fullmatch(pattern, key):
                spec = self._checked(key, shape, axes)
        if split and self.shards > 1:
            free = [a for a, size in enumerate(shape) if spec[a] is None and size % self.shards == 0]
            if free:
                spec[max(free, key=lambda a: shape[a])] = PIECES
        return NamedSharding(self.mesh, P(*spec))

    def _checked(self, key: str, shape: tuple[int, ...], axes: tuple) -> list[Any]:
        """The axes that a rule gives a parameter. Raises UserError where they do not fit its shape."""
        tensor = self.mesh.shape["tensor"]
        if len(axes) != len(shape):
            raise UserError(f"shard.rules: {key} has {len(shape)} axes, its rule names {len(axes)}")
        for axis, name in enumerate(axes):
            if name is not None and shape[axis] % tensor:
                raise UserError(f"shard.tensor: {tensor} does not divide axis {axis} of {key}, {list(shape)}")
        return list(axes)


def refuse_whole(layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises UserError where `shard.tensor` is to split layers, and no rule fits any parameter."""
    if layout.mesh.shape["tensor"] == 1:
        return
    for pattern in layout.rules:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UserError(f"shard.rules: {pattern!r} is no regular expression: {error}") from None
    if not any("tensor" in layout.parameter(key, shape).spec for key, shape in shapes.items()):
        raise UserError(
            f"shard.tensor: {layout.mesh.shape['tensor']}, but no rule splits a parameter of this model; give "
            "shard.rules, as {'.*\\.fc1\\.weight': [tensor, null]}, or set 1"
        )


def make_layout(config: Any, rules: Mapping[str, tuple] | None = None, devices: list | None = None) -> Layout:
    """The layout for a `shard` section over all devices of all processes (or the given ones).

    Raises UserError where the devices cannot be divided as asked.
    """
    devices = list(all_devices() if devices is None else devices)
    if config.devices is not None:
        devices = _first_of_each_process(devices, config.devices)
    data = len(devices)
    for name, wanted, whole in (("tensor", config.tensor, "layers"), ("sequence", config.sequence, "tokens")):
        if data % wanted:
            raise UserError(f"shard.{name}: {wanted} does not divide {data} devices")
        if config.strategy == "ddp_local" and wanted > 1:
            raise UserError(f"shard.{name}: with shard.strategy=ddp_local a device holds all {whole}; set 1, or ddp")
        data //= wanted
    replicas = {"ddp": data, "ddp_local": data, "hsdp": config.replicas or jax.process_count()}.get(config.strategy, 1)
    if data % replicas:
        raise UserError(f"shard.replicas: {replicas} does not divide {data} devices")
    grid = np.array(devices).reshape(replicas, data // replicas, config.sequence, config.tensor)
    mesh = Mesh(grid, (*BATCH_AXES, "sequence", "tensor"), axis_types=(AxisType.Auto,) * 4)
    return Layout(mesh, config.strategy, {**(rules or {}), **config.rules})


def _first_of_each_process(devices: list, count: int) -> list:
    """Raises UserError where a process has fewer."""
    own: dict[int, list] = {}
    for device in devices:
        own.setdefault(device.process_index, []).append(device)
    fewest = min(len(mine) for mine in own.values())
    if count > fewest:
        raise UserError(f"shard.devices: {count}, but this machine has {fewest}")
    return [device for mine in own.values() for device in mine[:count]]


def check_batch(size: int, accumulate: int, layout: Layout, key: str = "data.batch_size") -> None:
    """Raises UserError, with the nearest sizes that fit, where a batch cannot be divided over the devices."""
    unit = accumulate * layout.batch_devices
    if size % unit:
        below, above = size // unit * unit, -(-size // unit) * unit
        near = f"nearest are {below} and {above}" if below else f"nearest is {above}"
        parts = f"{layout.batch_devices} devices" + (f" x {accumulate} accumulation steps" if accumulate > 1 else "")
        raise UserError(f"{key}: {size} is not a multiple of {parts}; {near}")


def local_rows(size: int, layout: Layout) -> np.ndarray:
    """Return the rows of a global batch of `size` that this process reads, in order."""
    if not any(device.process_index == jax.process_index() for device in layout.mesh.devices.flat):
        return np.arange(size)  # stand-ins for devices that are elsewhere
    rows: set[int] = set()
    for slices in layout.rows(size).addressable_devices_indices_map((size,)).values():
        if slices is not None:
            rows.update(range(*slices[0].indices(size)))
    return np.array(sorted(rows))
