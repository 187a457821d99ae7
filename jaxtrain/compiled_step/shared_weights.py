"""Weights of torch modules on the devices: read from torch's tensors, and written back into them."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from jaxtrain.data.buffers import Buffers
from jaxtrain.errors import UserError
from jaxtrain.runtime import joining, launch, lockstep
from jaxtrain.runtime.lockstep import digest
from jaxtrain.runtime.mesh import Layout
from jaxtrain.runtime.prng import key_of

Arrays = dict[str, jax.Array]
FEW = 4  # of the tensors that a message names
_AHEAD = (
    "through memory that it shares (numpy(), .data of before) while the compiled step held newer values: call "
    "step.sync() before you change weights so"
)


class SharedWeights:
    """Parameters and buffers of the modules on the devices, shared by all updates.

    While the devices hold newer values, any torch code that reads or writes one of the tensors first triggers a sync of
    all of them; a tensor that torch changes after that is read again. Changes are detected by torch's version counters
    and, because writes through `.data` bypass these, by checksums of the values: of all values while torch's are the
    newest and at a sync, otherwise of a part of them at each call, in turn. generation: how many times the modules'
    parameters, buffers or submodules were replaced. updates: how many the devices have made. given: the user's modules.
    modules: these, and a last one with the `loose` parameters, if there are some.
    """

    def __init__(
        self,
        modules: Mapping[str, Any],
        layout: Layout,
        seed: int | None,
        updates: Iterable[tuple[Callable, Sequence[Any]]] = (),
        file: Any = None,
    ):
        """updates: each loss function and its optimizers, which may hold parameters that no module has. file: with the
        modules' weights, which are read onto the devices, not into torch's tensors."""
        from torch_bridge import from_torch, lazy_scalar, module_tensors, replicas, step_rules, torch_edits
        from torch_bridge.loose_parameters import given, loose_parameters
        from torch_bridge.lowering import ready

        self.bridge, self.exchange, self.edits = step_rules, module_tensors, torch_edits
        self.lazy = lazy_scalar
        self.modules = {name: from_torch.unwrapped(module) for name, module in modules.items()}
        if file is not None:
            from torch_bridge.files import module_weights

            module_weights.allocate(self.modules.values())
        for module in self.modules.values():
            ready.check_ready(module, rounds=False)
        self.given = given(self.modules)
        self.loose = loose_parameters(self.modules, updates)
        if self.loose is not None:
            self.modules[max((*self.modules, "loose"), key=len) + "_"] = self.loose  # no other name is that long
        self.arguments = replicas.arguments_of(modules)
        self.replicated = replicas.are_replicas(self.arguments)
        if layout.splits and self.replicated:
            raise UserError(
                f"shard: {layout.strategy} splits what DistributedDataParallel keeps whole in each process: hand over "
                "the module itself, in one process with all devices"
            )
        self.layout = layout
        self.rows: Any = None  # of a batch over several processes, GlobalRows
        self._read: list[str] = []  # values that this process has copied to its devices since the last turn
        if layout.several:
            self._join(file)
        seed = step_rules.seed_of(seed)
        self.key = key_of(launch.broadcast_from_process_zero("seed", lambda: seed) if layout.several else seed)
        self.generation = self.updates = 0
        self._former: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # tensors by id
        self.queue, self.buffers = module_tensors.Queue(), Buffers()
        self.device = module_tensors.device_of(next(iter(self.modules.values())))
        self._look(file)

    def _join(self, file: Any) -> None:
        """Give these modules process 0's weights in every process, as DistributedDataParallel does; a file's are the
        same in all."""
        from torch_bridge import same_tensors
        from torch_bridge.capture.global_rows import GlobalRows

        if self.replicated:
            raise UserError("DistributedDataParallel averages gradients itself: hand over the module without it")
        self.layout.pieces_here  # noqa: B018  # raises UserError
        modules = list(self.modules.values())
        sizes = [f"{name}: {type(module).__name__}" for name, module in self.modules.items()]
        lockstep.take_turn(
            {lockstep.NEXT: "a step is compiled", "modules": ", ".join(sizes), "shard": self.layout.strategy}
        )
        if file is None:
            same_tensors.replace(modules, joining.from_process_zero(same_tensors.bytes_of(modules)))
        self.rows = GlobalRows(jax.process_count())

    def take_turn(self, word: Mapping[str, str]) -> None:
        """Wait until the other processes are about to do the same with the same values; see runtime.lockstep."""
        if self.rows is not None:
            read, self._read = self._read, []
            text = ", ".join(read[:FEW]) + (f" and {len(read) - FEW} more" if len(read) > FEW else "")
            every = digest(np.frombuffer(" ".join(read).encode(), np.uint8)) if read else ""
            lockstep.take_turn({**word, "values read from torch": f"{text} {every}".strip()})

    def _look(self, file: Any = None) -> None:
        """Read the modules' current tensors, and their values from torch or a file."""
        self.lazy.in_buffers(self.modules.values())
        self.submodules = [inner for module in self.modules.values() for inner in module.modules()]
        self.tables = self.edits.ModuleTables(self.modules)
        self.tensors, self.aliases = self.exchange.snapshot(self.modules)
        self.names = {id(tensor): name for name, tensor in self.tensors.items()}
        self._admitted: list[Any] = []
        self.edited = self.edits.TensorEdits(self.tensors)
        self.arrays: Arrays = {}
        self.dirty = False  # the devices hold newer values than torch
        self._awaited = self.exchange.Awaited(self.tensors.values(), self.sync)
        self.counters: set[str] = set()  # int64 buffers that stay int64, because they may grow beyond 32 bits
        if file is None:
            self.read(self.tensors)
        else:
            self._load(file)

    def _load(self, file: Any) -> None:
        """Read a file's weights onto the devices, one tensor at a time; torch's tensors get them when they are read."""
        from torch_bridge.files import module_weights

        modules = {name: module for name, module in self.modules.items() if module is not self.loose}
        sources = module_weights.of_file(file, modules, self.tensors, self.aliases)
        self.read([name for name in self.tensors if name not in sources])
        for name, source in sources.items():
            self.arrays |= self.placed({name: self.exchange.of_numpy(source())})
            self.arrays[name].block_until_ready()  # before the next one is read
        self.edited.note()
        self.move_ahead()

    def placed(self, arrays: Mapping[str, Any]) -> Arrays:
        """Return arrays by name on the devices: parameters, and gradients of such, as the strategy splits them, buffers
        whole on each device."""
        return {name: self._put(value, self._sharding(name, value.shape), name) for name, value in arrays.items()}

    def placed_state(self, state: Any) -> Any:
        """Return an optimizer's state on the devices, moments as the strategy splits them."""
        if self.rows is None:
            return jax.device_put(state, self._moments(state))
        return jax.tree.map(lambda value, sharding: self._put(value, sharding, "a moment"), state, self._moments(state))

    def _put(self, value: Any, sharding: Any, name: str) -> jax.Array:
        if self.rows is not None and not (isinstance(value, jax.Array) and not value.is_fully_addressable):
            self._read.append(f"{name} {digest(np.asarray(value))}")
        return self.layout.put(value, sharding)

    def constrained(self, arrays: Arrays, state: Any) -> tuple[Arrays, Any]:
        """Keep weights and the optimizer's state as `placed` and `placed_state` have them. Traced."""
        if not (self.layout.splits or self.layout.several):
            return arrays, state
        constraint = jax.lax.with_sharding_constraint
        arrays = {name: constraint(value, self._sharding(name, value.shape)) for name, value in arrays.items()}
        return arrays, constraint(state, self._moments(state))

    def described(self) -> str:
        """Return how many devices train and what they split, as a sentence; "" for a single device."""
        count = self.layout.mesh.size
        if count == 1:
            return ""
        whole = sum(array.nbytes for array in self.arrays.values())
        split = sum(array.nbytes for array in self.arrays.values() if not array.is_fully_replicated) / max(whole, 1)
        where = f"{count} devices" + (f" of {jax.process_count()} processes" if self.layout.several else "")
        return f"a step runs on {where}, {self.layout.strategy}: {split:.0%} of the weights' bytes are split"

    def scattered(self, grads: Arrays) -> Arrays:
        """Reduce gradients to the devices that hold the moments. Traced."""
        if not self.layout.splits:
            return grads
        moment = self.layout.moment
        return {k: jax.lax.with_sharding_constraint(g, moment(k, g.shape)) for k, g in grads.items()}

    def everywhere(self, values: list[jax.Array]) -> list[jax.Array]:
        """Let each process have the whole of these results. Traced."""
        if self.rows is None:
            return values
        return [jax.lax.with_sharding_constraint(value, self.layout.replicated) for value in values]

    def local(self, value: Any) -> Any:
        """Return this process's copy of a result that all have, so that Python may compute with it in one alone."""
        return value if self.rows is None or value is None else value.addressable_data(0)

    def _sharding(self, name: str, shape: tuple[int, ...]) -> Any:
        whole = self.tensors.get(name) is not None and not self.exchange.is_parameter(self.tensors[name])
        return self.layout.replicated if whole else self.layout.parameter(name, shape)

    def _moments(self, state: Any) -> Any:
        return self.layout.moments(state, {name: array.shape for name, array in self.arrays.items()})

    def read(self, names: Iterable[str]) -> None:
        """Copy these tensors' values from torch to the devices."""
        for name in names:
            array = self.exchange.to_array(self.tensors[name], wide=name in self.counters)
            self.arrays |= self.placed({name: array})
        self.edited.note(names)

    def admit(self, parameters: Iterable[Any]) -> None:
        """Name those of an optimizer's parameters that the modules have had and no longer have. No loss reaches them,
        so they stay as they are, as in torch."""
        for parameter in parameters:
            if id(parameter) not in self.names and self._former.get(id(parameter)) is parameter:
                self._admitted.append(parameter)
                name = self.names[id(parameter)] = f"replaced parameter {len(self._admitted)}"
                self.arrays |= self.placed({name: self.exchange.to_array(parameter)})

    def widen(self, names: Iterable[str]) -> None:
        """Keep these buffers in 64 bits from now on."""
        for name in {self.first_name(name) for name in names} - self.counters:
            self.counters.add(name)
            self.arrays |= self.placed({name: self.exchange.as_wide(self.arrays[name])})

    def refresh(self) -> None:
        """Read tensors that torch has changed since. Raises UserError if that would discard trained values."""
        if self.tables.changed() and not self._adopt(self.tables.assigned()):
            self.sync()  # into the modules' previous tensors
            self._former.update((id(tensor), tensor) for tensor in self.tensors.values())
            self.generation += 1
            self._look()
            return
        if not self.dirty:
            self.exchange.settle(self.tensors.values())  # if another step holds newer values
        with self.exchange.plainly():
            changed = self.edited.some() if self.dirty else self.edited.all()
        if changed and self.dirty:
            raise UserError(f"{changed[0]} was changed in torch {_AHEAD}")
        if changed:
            self.read(changed)

    def _adopt(self, assigned: Sequence[tuple[Any, Any]]) -> bool:
        """Take buffers that code has assigned anew, as in `self.mean = ...`, for those before. Return False if there
        are none, or one has several names."""
        if not assigned or any(self.names.get(id(old)) in {None, *self.aliases.values()} for old, _ in assigned):
            return False
        for old, new in assigned:
            name = self.names.pop(id(old))
            self.names[id(new)] = name
            self._awaited.replace(old, new)
            with self.exchange.plainly():
                if self.dirty:  # whoever holds the former one reads its last value
                    self.exchange.write({name: old}, self.arrays)
                self.tensors[name] = self.edited.tensors[name] = new
                self.read([name])
        return True

    def sync(self, overwrite: bool = False) -> None:
        """Write the values into torch's tensors, in place. Raises UserError if torch has changed one meanwhile."""
        if not self.dirty:
            return
        with self.exchange.plainly():
            changed = [] if overwrite else self.edited.all()
        if changed:
            raise UserError(f"{changed[0]} was changed in torch {_AHEAD}; sync(overwrite=True) drops that change")
        if any(not array.is_fully_replicated for array in self.arrays.values()):
            self.take_turn({lockstep.NEXT: "the weights are gathered"})
        self.forget()
        self.exchange.write(self.tensors, self.arrays)
        self.edited.note()

    def move_ahead(self) -> None:
        """Note that the devices now hold newer values; from now on, torch code that uses the tensors syncs first."""
        self.updates += 1
        if not self.dirty:
            self.dirty = True
            self._awaited.hold()

    def shown(self) -> contextlib.AbstractContextManager:
        """Return a context in which the tensors look as if torch held the newest values; nothing in it may read any."""
        return self._awaited.shown()

    def forget(self) -> None:
        """Treat torch's values as the newest; the devices' values are not written back."""
        if self.dirty:
            self.dirty = False
            self._awaited.release()

    def first_name(self, name: str) -> str:
        """Return the name under which a tied tensor is stored."""
        return self.aliases.get(name, name)

    def by_memory(self) -> dict[tuple, str]:
        """Return the names of the tensors by address, shape, strides and dtype."""
        return {(t.data_ptr(), t.shape, t.stride(), t.dtype): name for name, t in self.tensors.items() if t.numel()}

    def versions(self) -> dict[str, int]:
        """Return the version counters of torch's tensors, by name."""
        return {name: tensor._version for name, tensor in self.tensors.items()}

    def placed_rows(self, leaf: Any) -> jax.Array:
        """Return an array on the devices in JAX's dtype widths, split by rows if they divide it, else whole on each."""
        leaf = np.array(self.exchange.narrow(leaf))
        return jax.device_put(leaf, self.layout.rows(len(leaf)) if leaf.ndim else self.layout.replicated)

    def place_global(self, leaf: np.ndarray, rows: np.ndarray | None) -> jax.Array:
        """Return an array of a batch over several processes on their devices, in JAX's dtype widths. rows: those that
        this process has of it; None if all processes have the same `leaf`."""
        if rows is None:
            return self.layout.put(np.array(self.exchange.narrow(leaf)), self.layout.replicated)
        rows = np.array(self.exchange.narrow(rows))
        if len(rows) % self.layout.pieces_here:
            return self.layout.put(process_allgather(rows, tiled=True), self.layout.replicated)
        return jax.make_array_from_process_local_data(self.layout.batch(), rows, leaf.shape)

    def place(self, leaf: Any) -> Any:
        """Return a batch's array in JAX's dtype widths, split by rows over the devices if they divide it, else whole on
        each. It is copied: the step reads it later, when torch may be writing the next batch into the same memory."""
        given, leaf = leaf, self.exchange.narrow(leaf)
        if leaf is given and isinstance(leaf, np.ndarray):
            leaf = self.buffers.empty(given.shape, given.dtype)
            np.copyto(leaf, given)
        pieces = self.layout.batch_devices
        if pieces == 1 and not isinstance(leaf, jax.Array):
            return leaf  # the call itself copies it to the device
        split = leaf.ndim and leaf.shape[0] % pieces == 0
        return jax.device_put(leaf, self.layout.batch() if split else self.layout.replicated)
