"""The device mesh of a run, and the placement of its arrays on it."""

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
PIECES = ("fsdp", "sequence")  # sharded parameters and moments are split over both


@dataclasses.dataclass(frozen=True)
class Layout:
    """The mesh (replica, fsdp, sequence, tensor) and the rules that place arrays on it."""

    mesh: Mesh
    strategy: str
    rules: Mapping[str, tuple]

    @property
    def batch_devices(self) -> int:
        """The number of pieces that a batch is split into."""
        return self.mesh.shape["replica"] * self.mesh.shape["fsdp"]

    @property
    def shards(self) -> int:
        """The number of pieces that fsdp splits an array into, over the fsdp and sequence axes together."""
        return self.mesh.shape["fsdp"] * self.mesh.shape["sequence"]

    @property
    def per_device(self) -> bool:
        """Return True if each device computes its own rows, as in DistributedDataParallel."""
        return self.strategy == "ddp_local"

    @property
    def whole_on_gpus(self) -> bool:
        """Return True if the devices are GPUs and each holds the whole of every array that the optimizer updates."""
        whole = self.mesh.size == 1 or (self.strategy in ("ddp", "ddp_local") and self.mesh.shape["tensor"] == 1)
        return whole and self.mesh.devices.flat[0].platform == "gpu"

    @property
    def several(self) -> bool:
        """Return True if the devices belong to several processes."""
        return self.mesh.is_multi_process

    @property
    def pieces_here(self) -> int:
        """The number of pieces of a batch that this process's devices hold, if they belong to several processes.

        Raises UserError if processes share pieces, or hold them in another order than their numbers.
        """
        processes = sorted({device.process_index for device in self.mesh.devices.flat})
        if processes != list(range(jax.process_count())):
            raise UserError(f"devices: of {len(processes)} processes, wanted all {jax.process_count()}, or this one's")
        pieces, uneven = divmod(self.batch_devices, len(processes))
        held = self.batch().addressable_devices_indices_map((self.batch_devices,)).values()
        rows = sorted({held_rows[0].indices(self.batch_devices)[0] for held_rows in held if held_rows is not None})
        first = jax.process_index() * pieces
        if uneven or rows != list(range(first, first + pieces)):
            raise UserError(
                f"shard: {self.batch_devices} pieces of a batch over {len(processes)} processes, and a process reads "
                "its own rows: take a shard.tensor that divides the devices of a process, and devices in their order"
            )
        return pieces

    def put(self, value: Any, sharding: NamedSharding) -> jax.Array:
        """Place an array that all processes hold whole, or move one that is on the devices."""
        if sharding.is_fully_addressable or (isinstance(value, jax.Array) and not value.is_fully_addressable):
            return jax.device_put(value, sharding)
        value = np.asarray(value)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, P())

    def spread(self) -> contextlib.AbstractContextManager:
        """Return a context that tells layers written per device how a batch is divided over the devices. Traced."""
        whole = self.per_device or self.mesh.size == 1
        return spread(None if whole else self.mesh, BATCH_AXES, ("tensor",), ("sequence",))

    def batch(self, leading: int = 0) -> NamedSharding:
        """Return the sharding that splits rows over the batch axes; `leading` axes before the rows (steps per call,
        accumulation) are not split."""
        return NamedSharding(self.mesh, P(*(None,) * leading, BATCH_AXES))

    def rows(self, size: int, leading: int = 0) -> NamedSharding:
        """Return `batch(leading)`, or `replicated` if `size` is not divisible by the number of batch devices."""
        return self.replicated if size % self.batch_devices else self.batch(leading)

    def parameter(self, key: str, shape: tuple[int, ...]) -> NamedSharding:
        """Return the sharding of a parameter between steps."""
        return self._place(key, shape, split=self.strategy in ("fsdp", "hsdp"))

    def moment(self, key: str, shape: tuple[int, ...]) -> NamedSharding:
        """Return the sharding of a parameter's moments in the optimizer; gradients are reduced to the same sharding."""
        return self._place(key, shape, split=self.strategy in ("fsdp", "hsdp", "shard_grad_op"))

    def moments(self, state: Any, shapes: Mapping[str, tuple[int, ...]]) -> Any:
        """Return the shardings of an optimizer's state. An array with a parameter's key in its path, and its shape, is
        split as moments are; any other is whole on each device. shapes: of the parameters."""

        def one(path: Any, leaf: Any) -> NamedSharding:
            key = next((part.key for part in reversed(path) if getattr(part, "key", None) in shapes), None)
            return self.moment(key, leaf.shape) if key and leaf.shape == shapes[key] else self.replicated

        return jax.tree_util.tree_map_with_path(one, state)

    @property
    def splits(self) -> bool:
        """Return True if parameters or their moments are stored sharded."""
        return self.mesh.shape["tensor"] > 1 or (self.strategy in ("fsdp", "hsdp", "shard_grad_op") and self.shards > 1)

    @property
    def gathers(self) -> bool:
        """Return True if parameters are stored sharded and gathered for use."""
        return self.strategy in ("fsdp", "hsdp") and self.shards > 1

    def is_split(self, key: str, shape: tuple[int, ...]) -> bool:
        """Return True if a parameter is stored sharded and gathered for use."""
        return self._pieces in self.parameter(key, shape).spec

    def gather(self, params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Gather the parameters for one forward or backward pass; their gradients are sharded again. Traced.

        Source: Zhao et al. 2023 (FSDP), full sharding.
        """
        if not self.gathers:
            return dict(params)
        return {key: self._gather(value, self.parameter(key, value.shape)) for key, value in params.items()}

    def _gather(self, value: jax.Array, kept: NamedSharding) -> jax.Array:
        whole = NamedSharding(self.mesh, P(*(None if axis == self._pieces else axis for axis in kept.spec)))

        together = lambda x: jax.lax.with_sharding_constraint(x, whole)
        apart = lambda _, g: (jax.lax.with_sharding_constraint(g, kept),)
        gather = jax.custom_vjp(together)
        gather.defvjp(lambda x: (together(x), None), apart)
        return gather(jax.lax.optimization_barrier(value))  # else XLA would gather before the cast to bf16

    def scatter(self, grads: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Reduce-scatter gradients to the sharding of the moments if the strategy is shard_grad_op. Traced."""
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
                spec[max(free, key=lambda a: shape[a])] = self._pieces
        while spec and spec[-1] is None:  # as JAX writes what a program returns: else its next call compiles it again
            spec.pop()
        return NamedSharding(self.mesh, P(*spec))

    @property
    def _pieces(self) -> Any:
        """The axes of the mesh over which fsdp splits an array, without those of one device."""
        axes = tuple(axis for axis in PIECES if self.mesh.shape[axis] > 1)
        return axes[0] if len(axes) == 1 else axes

    def _checked(self, key: str, shape: tuple[int, ...], axes: tuple) -> list[Any]:
        """Return a rule's axes for a parameter. Raises UserError if they do not fit its shape."""
        tensor = self.mesh.shape["tensor"]
        if len(axes) != len(shape):
            raise UserError(f"shard.rules: {key} has {len(shape)} axes, its rule names {len(axes)}")
        for axis, name in enumerate(axes):
            if name is not None and shape[axis] % tensor:
                raise UserError(f"shard.tensor: {tensor} does not divide axis {axis} of {key}, {list(shape)}")
        return list(axes)


def refuse_whole(layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise UserError if `shard.tensor` should split layers but no rule matches a parameter."""
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
    """Return the layout of a `shard` config section over all devices of all processes (or the given ones).

    Raises UserError if the devices cannot be divided as requested.
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
    """Return the first `count` devices of each process. Raises UserError if a process has fewer."""
    own: dict[int, list] = {}
    for device in devices:
        own.setdefault(device.process_index, []).append(device)
    fewest = min(len(mine) for mine in own.values())
    if count > fewest:
        raise UserError(f"shard.devices: {count}, but this machine has {fewest}")
    return [device for mine in own.values() for device in mine[:count]]


def check_batch(size: int, accumulate: int, layout: Layout, key: str = "data.batch_size") -> None:
    """Raise UserError, naming the nearest sizes that fit, if a batch cannot be divided over the devices."""
    unit = accumulate * layout.batch_devices
    if size % unit:
        below, above = size // unit * unit, -(-size // unit) * unit
        near = f"nearest are {below} and {above}" if below else f"nearest is {above}"
        parts = f"{layout.batch_devices} devices" + (f" x {accumulate} accumulation steps" if accumulate > 1 else "")
        raise UserError(f"{key}: {size} is not a multiple of {parts}; {near}")


def local_rows(size: int, layout: Layout) -> np.ndarray:
    """Return the rows of a global batch of `size` that this process reads, in order."""
    if not any(device.process_index == jax.process_index() for device in layout.mesh.devices.flat):
        return np.arange(size)  # descriptions of devices that this machine does not have
    rows: set[int] = set()
    for slices in layout.rows(size).addressable_devices_indices_map((size,)).values():
        if slices is not None:
            rows.update(range(*slices[0].indices(size)))
    return np.array(sorted(rows))
