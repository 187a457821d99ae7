"""Weights of torch modules on the devices, read from torch's tensors and written back into them."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxtrain.data.buffers import Buffers
from jaxtrain.errors import UserError
from jaxtrain.runtime.mesh import Layout

Arrays = dict[str, jax.Array]
_AHEAD = (
    "through memory that it shares (numpy(), .data of before) while the compiled step held newer values: call "
    "step.sync() before you change weights so"
)


class SharedWeights:
    """Parameters and buffers of the modules on the devices, shared by all updates.

    While the devices hold newer values, torch's tensors are awaited: code that reads or writes one has them all brought
    up to date first. A tensor that torch changes then is read again. Changes are
    seen by torch's version counters and, because writes through `.data` pass these by, by checksums of the values: all
    of them while torch's values are the newest and at a sync, else a part in every call, in turn.
    generation: counts the times that the modules have got other parameters, buffers or submodules.
    """

    def __init__(self, modules: Mapping[str, Any], layout: Layout, seed: int | None):
        from torch_bridge import from_torch, lazy_scalar, module_tensors, replicas, step_record, torch_edits
        from torch_bridge.lowering.recording import ready

        self.bridge, self.exchange, self.edits = step_record, module_tensors, torch_edits
        self.lazy = lazy_scalar
        self.modules = {name: from_torch.unwrapped(module) for name, module in modules.items()}
        for module in self.modules.values():
            ready.check_ready(module)
        self.replicas = replicas.Replicas(modules)
        self.layout = layout
        self.key = jax.random.key(step_record.seed_of(seed))
        self.generation = 0
        self.queue, self.buffers = module_tensors.Queue(), Buffers()
        self._look()

    def _look(self) -> None:
        """Take the modules' tensors as they are now."""
        self.lazy.in_buffers(self.modules.values())
        self.submodules = [inner for module in self.modules.values() for inner in module.modules()]
        self.tables = self.edits.ModuleTables(self.modules)
        self.tensors, self.aliases = self.exchange.snapshot(self.modules)
        self.names = {id(tensor): name for name, tensor in self.tensors.items()}
        self.edited = self.edits.TensorEdits(self.tensors)
        self.arrays: Arrays = {}
        self.dirty = False  # the devices hold newer values than torch
        self._awaited = self.exchange.Awaited(self.tensors.values(), self.sync)
        self.counters: set[str] = set()  # int64 buffers that are kept so, as they may grow beyond 32 bits
        self.read(self.tensors)

    def read(self, names: Iterable[str]) -> None:
        """Take these tensors' values from torch."""
        for name in names:
            array = self.exchange.to_array(self.tensors[name], wide=name in self.counters)
            self.arrays[name] = jax.device_put(array, self.layout.replicated)
        self.edited.note(names)

    def widen(self, names: Iterable[str]) -> None:
        """Keep these buffers in 64 bits from now on."""
        for name in {self.first_name(name) for name in names} - self.counters:
            self.counters.add(name)
            self.arrays[name] = jax.device_put(self.exchange.as_wide(self.arrays[name]), self.layout.replicated)

    def reached(self, graph: Any, loss: str) -> set[str]:
        """Name the tensors that the gradient of the loss reaches, not those of values that are only logged.

        Raises UserError where no parameter that takes a gradient is among them, and under torch.no_grad().
        """
        self.bridge.check_gradients_on(loss)
        names = {self.first_name(name) for name in graph.differentiable([0]) & graph.state}
        if graph.gives_tensor and not any(self.tensors[name].requires_grad for name in names):
            raise UserError(
                f"{loss}: no parameter that requires a gradient reaches the loss (detach(), item(), no_grad() or "
                "requires_grad_(False)), so there is nothing to train; torch's backward() refuses it too"
            )
        return names

    def refresh(self) -> None:
        """Read what torch changed since; refuse where that would throw trained values away."""
        if self.tables.changed():
            self.sync()  # into the tensors that were the modules'
            self.generation += 1
            self._look()
            return
        if not self.dirty:
            self.exchange.settle(self.tensors.values())  # where another step is ahead
        with self.exchange.plainly():
            changed = self.edited.some() if self.dirty else self.edited.all()
        if changed and self.dirty:
            raise UserError(f"{changed[0]} was changed in torch {_AHEAD}")
        if changed:
            self.read(changed)

    def sync(self, overwrite: bool = False) -> None:
        """Write the values into torch's tensors, in place. Raises UserError where torch has changed them meanwhile."""
        if not self.dirty:
            return
        with self.exchange.plainly():
            changed = [] if overwrite else self.edited.all()
        if changed:
            raise UserError(f"{changed[0]} was changed in torch {_AHEAD}; sync(overwrite=True) drops that change")
        self.forget()
        self.exchange.write(self.tensors, self.arrays)
        self.edited.note()

    def move_ahead(self) -> None:
        """Note that the devices hold newer values than torch, whose tensors are awaited from now on."""
        if not self.dirty:
            self.dirty = True
            self._awaited.hold()

    def forget(self) -> None:
        """Take torch's values for the newest."""
        if self.dirty:
            self.dirty = False
            self._awaited.release()

    def first_name(self, name: str) -> str:
        """Return the name that stands for a tied tensor."""
        return self.aliases.get(name, name)

    def state(self, arrays: Arrays) -> Arrays:
        """The arrays with tied ones under each of their names."""
        return arrays | {alias: arrays[name] for alias, name in self.aliases.items()}

    def place(self, leaf: Any) -> Any:
        """A batch's array in JAX's widths; over the devices by rows where they divide it, else on each of them. A copy:
        the step reads it after the call, when torch may be writing the next batch into the same memory."""
        given, leaf = leaf, self.exchange.narrow(leaf)
        if leaf is given and isinstance(leaf, np.ndarray):
            leaf = self.buffers.empty(given.shape, given.dtype)
            np.copyto(leaf, given)
        pieces = self.layout.batch_devices
        if pieces == 1 and not isinstance(leaf, jax.Array):
            return leaf  # the call itself takes it to the device
        split = leaf.ndim and leaf.shape[0] % pieces == 0
        return jax.device_put(leaf, self.layout.batch() if split else self.layout.replicated)
