"""Weights of torch modules on the devices, read from torch's tensors and written back into them."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from jaxtrain.errors import UserError
from jaxtrain.runtime.mesh import Layout

Arrays = dict[str, jax.Array]
CHECKED_BYTES = 1 << 17  # of the tensors that are looked at in a call while the devices hold newer values


class SharedWeights:
    """Parameters and buffers of the modules on the devices, shared by all updates.

    torch's tensors hold the values of the last `sync`; a tensor that torch changes after it is read again. Changes are
    seen by torch's version counters and, because writes through `.data` pass these by, by checksums of the values: all
    of them while torch's values are the newest, else a part in every call, in turn.
    """

    def __init__(self, modules: Mapping[str, Any], layout: Layout, seed: int | None):
        from torch_bridge import from_torch, step_record

        self.bridge = step_record
        self.modules = {name: from_torch.unwrapped(module) for name, module in modules.items()}
        self.layout = layout
        self.submodules = [inner for module in self.modules.values() for inner in module.modules()]
        self.tensors, self.aliases = step_record.snapshot(self.modules)
        self.names = {id(tensor): name for name, tensor in self.tensors.items()}
        self.key = jax.random.key(step_record.seed_of(seed))
        self.arrays: Arrays = {}
        self.versions: dict[str, int] = {}
        self.marks: dict[str, int] = {}
        self._turn = itertools.cycle(self.tensors)
        self.dirty = False  # the devices hold newer values than torch
        self.read(self.tensors)

    def read(self, names: Iterable[str]) -> None:
        """Take these tensors' values from torch."""
        for name in names:
            self.arrays[name] = jax.device_put(self.bridge.to_array(self.tensors[name]), self.layout.replicated)
            self.marks[name] = self.bridge.checksum(self.tensors[name])
        self.versions = {name: tensor._version for name, tensor in self.tensors.items()}

    def refresh(self) -> None:
        """Read what torch changed since; refuse where that would throw trained values away."""
        looked_at = self._next() if self.dirty else self.tensors
        changed = [
            name
            for name, tensor in self.tensors.items()
            if tensor._version != self.versions[name]
            or (name in looked_at and self.bridge.checksum(tensor) != self.marks[name])
        ]
        if changed and self.dirty:
            raise UserError(
                f"{changed[0]} was changed in torch while the compiled step held newer values; call step.sync() before "
                "you change weights"
            )
        if changed:
            self.read(changed)

    def _next(self) -> set[str]:
        """The names whose turn it is: as many as CHECKED_BYTES hold, one at least."""
        names: set[str] = set()
        size = 0
        while size < CHECKED_BYTES and len(names) < len(self.tensors):
            name = next(self._turn)
            names.add(name)
            size += self.tensors[name].nbytes
        return names

    def sync(self) -> None:
        """Write the values into torch's tensors, in place."""
        self.bridge.write(self.tensors, self.arrays)
        self.versions = {name: tensor._version for name, tensor in self.tensors.items()}
        self.marks = {name: self.bridge.checksum(tensor) for name, tensor in self.tensors.items()}
        self.dirty = False

    def first_name(self, name: str) -> str:
        """Return the name that stands for a tied tensor."""
        return self.aliases.get(name, name)

    def state(self, arrays: Arrays) -> Arrays:
        """The arrays with tied ones under each of their names."""
        return arrays | {alias: arrays[name] for alias, name in self.aliases.items()}

    def place(self, leaf: Any) -> Any:
        """A batch's array in JAX's widths; over the devices by rows where they divide it, else on each of them."""
        leaf = self.bridge.narrow(leaf)
        pieces = self.layout.batch_devices
        if pieces == 1:
            return leaf  # the call itself takes it to the device
        split = leaf.ndim and leaf.shape[0] % pieces == 0
        return jax.device_put(leaf, self.layout.batch() if split else self.layout.replicated)
