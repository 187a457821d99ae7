"""One compiled update of shared weights, and several of them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.compiled_step import leftovers
from jaxtrain.compiled_step.averaging import Averaging
from jaxtrain.compiled_step.finite import OnlyFinite
from jaxtrain.compiled_step.forward import CompiledForward
from jaxtrain.compiled_step.seen_shapes import MANY, SeenShapes
from jaxtrain.compiled_step.shared_weights import Arrays, SharedWeights
from jaxtrain.compiled_step.torch_updates import TorchUpdates, take_over
from jaxtrain.errors import NoCounterpart, UserError
from jaxtrain.optim.optimizer import clip, global_norm
from jaxtrain.optim.several import OptimizerList, SchedulerList, SeveralUpdates
from jaxtrain.optim.torch_optimizer import OptaxUpdate, TorchUpdate, UpdateInTorch, Updates
from jaxtrain.runtime import jax_settings
from jaxtrain.runtime.prng import Rngs

MOST_IN_VAIN = 16  # records that compute what an earlier one does, where most calls ask for one


class CompiledStep:
    """One compiled update; made by `compile` and `compile_many`. `count`: calls so far. `clip_norm` may be set between
    calls."""

    def __init__(
        self, index: int, weights: SharedWeights, loss_fn, optimizer, scheduler, accumulate, precision, clip_norm
    ):
        self.weights, self.optimizer, self.scheduler = weights, optimizer, scheduler
        self.key = jax.random.fold_in(weights.key, index)
        self.accumulate, self.precision, self.clip_norm = accumulate, precision, clip_norm
        self.loss_fn = loss_fn
        self.updates = self._look()
        if scheduler is not None and not hasattr(optimizer, "param_groups"):
            raise UserError("scheduler: an optax optimizer holds its own schedule; leave scheduler out")
        optimizers = list(optimizer) if isinstance(optimizer, OptimizerList) else [optimizer]
        for one in scheduler.schedulers if isinstance(scheduler, SchedulerList) else [scheduler]:
            weights.bridge.check_scheduler(one, optimizers)
        self.grads: Arrays = {}
        for one in optimizers:
            weights.exchange.before_optimizer(one, self._bring_up_to_date)
        weights.exchange.refuse_other_optimizers(weights.tensors.values(), optimizers)
        self.torch: TorchUpdates | None = None  # runs the steps that cannot be one program
        self.count = self._calls = self._in_vain = 0  # in vain: recorded anew, and nothing else was computed
        self.shapes = SeenShapes()
        self.parts: dict[str, Any] = {}
        self.grad_norm: Any = None

    def _look(self) -> Updates:
        """Take the modules and the optimizer as they are now."""
        weights, optimizer = self.weights, self.optimizer
        self.generation, self._state_awaited = weights.generation, None
        self._record_anew(weights.edits.structure_of(weights.submodules))
        updates: Updates
        if hasattr(optimizer, "param_groups"):
            try:
                several = isinstance(optimizer, OptimizerList)
                updates = (SeveralUpdates if several else TorchUpdate)(optimizer, weights.names)
            except NoCounterpart as error:
                updates = UpdateInTorch(optimizer, weights.names, str(error).partition(";")[0])
        elif hasattr(optimizer, "init") and hasattr(optimizer, "update"):
            updates = OptaxUpdate(optimizer, weights.exchange.trainable(weights.tensors))
        else:
            raise UserError(
                f"optimizer: {type(optimizer).__name__}, wanted a torch.optim optimizer, a list of them, or "
                "an optax GradientTransformation"
            )
        self.opt_state = updates.state({key: weights.arrays[key] for key in updates.keys})
        self.averaging = Averaging(weights, updates.keys) if weights.replicas.averaged else None
        return updates

    def _record_anew(self, structure: tuple) -> None:
        """Forget the programs. structure: the modules' hooks, and forwards of their own, that new ones will hold."""
        self.structure = structure
        self.record = self.weights.bridge.LossRecord(self.weights.modules, self.loss_fn, self.weights.replicas)
        self._programs: dict[Any, Any] = {}

    def _refresh(self) -> None:
        """Follow what torch, or another step, changed since: weights, the optimizer's state, groups and parameters."""
        self.weights.refresh()
        if not self.updates.ahead:
            self.weights.exchange.settle(self.weights.exchange.state_tensors(self.optimizer))
        moved = self.weights.generation != self.generation or self.updates.regrouped()
        if moved and (self.grads or not hasattr(self.optimizer, "param_groups")):
            waiting = "gradients wait for an update" if self.grads else "an optax optimizer's state is fixed"
            raise UserError(f"the module or the optimizer's groups have changed while {waiting}: compile the step anew")
        if moved:
            self._write_state()
            self.updates = self._look()
        elif self.updates.edited():
            self.opt_state = self.updates.state({key: self.weights.arrays[key] for key in self.updates.keys})

    def __call__(self, batch: Any, update: bool | None = None) -> Any:
        """One call on a batch of tensors or arrays: the loss, or (loss, values to log) as the loss function gives them.

        Every `accumulate`-th call updates the weights with the mean of their gradients. update: decide it here instead,
        True or False; gradients are then summed, as backward() does. Numbers that the loss reads from Python
        (attributes, variables around it) may change. Where the loss cannot be one program (it keeps something in
        Python, or branches on values), torch runs it around the compiled modules, and a warning says why. Raises
        torch's own error for a batch or a loss that torch cannot run either, and UserError for what is refused.
        """
        if not self.count and self.clip_norm is None:
            leftovers.tell_clipping()
        if self.torch is None:
            refused = None
            try:
                call = self.prepare(batch, update)
                reason = self.changes
                if not reason or not hasattr(self.optimizer, "param_groups"):
                    return call()
            except self.weights.bridge.CannotRecord as error:
                if not hasattr(self.optimizer, "param_groups"):
                    raise
                refused, reason = error, self.weights.bridge.reason_of(error)
            return take_over(self, batch, update, reason, refused)
        return self.torch(batch, update)

    @property
    def changes(self) -> str:
        """Name what the loss changes in Python, in words; "" for nothing. Known once a call is prepared."""
        left = ", ".join(sorted(self.record.left)[:3])
        return left and f"{self.record.name} changes {left} in Python"

    def prepare(self, batch: Any, update: bool | None = None) -> Callable[[], Any]:
        """Record what this call needs, if that is new, and return the call. Raises UserError as the call does."""
        leaves, spec, batch_type = self.weights.bridge.flatten(batch)
        with self.weights.exchange.plainly():  # no values are looked at
            self._refresh()
            self.weights.replicas.check()
            modes = self.weights.bridge.flags_of(self.weights.submodules)
            structure = self.weights.edits.structure_of(self.weights.submodules)
            trained, switches = self.updates.trained(), self.updates.switches()
        if structure != self.structure:  # hooks were added or removed
            self._record_anew(structure)
        if isinstance(self.updates, UpdateInTorch):
            raise self.weights.bridge.CannotRecord(self.updates.reason)
        if self.weights.bridge.anomalies_are_looked_for():
            raise self.weights.bridge.CannotRecord("torch's anomaly mode looks into torch's own backward pass")
        self.record.check_captured()
        self._calls += 1
        updating = (self.count + 1) % self.accumulate == 0 if update is None else update
        divisor = self.accumulate if update is None else 1
        shapes = tuple((x.shape, x.dtype) if hasattr(x, "shape") else x for x in leaves)
        key = (spec, batch_type, modes, trained, switches, updating, divisor, shapes)
        python, numbers = self.record.python()
        program = self._programs.get((python, key))
        if program is None:
            self._note(shapes)
            graph, numbers = self.record.graph(leaves, spec, modes, batch_type)
            self.weights.widen(graph.counters)
            if unfit := graph.unfit([*leaves, *numbers], self.weights.state(self.weights.arrays)):
                raise self.weights.bridge.CannotRecord(f"{self.record.name}: {unfit}")
            program = self._programs.get((id(graph), key))  # other values of Python's may have led to the same graph
            if program is None:
                program = self._program(graph, [*leaves, *numbers], trained, updating, divisor)
            else:
                self._recorded_in_vain()
            self._programs[id(graph), key] = self._programs[self.record.python()[0], key] = program
        if self.weights.bridge.register_late(self.record.left, self.weights.modules):
            return self.prepare(batch, update)  # with hooks that stay
        return lambda: program([*leaves, *numbers])

    def _note(self, shapes: tuple) -> None:
        """Raise CannotRecord where nearly every batch has a shape of its own: each would be compiled for one call."""
        self.shapes.note(tuple(shape for shape in shapes if isinstance(shape, tuple)), self._calls)
        if self.shapes.endless and hasattr(self.optimizer, "param_groups"):
            raise self.weights.bridge.CannotRecord(
                f"{MANY} batches have come in as many shapes: pad them to a few in the collate function"
            )

    def _recorded_in_vain(self) -> None:
        """Raise CannotRecord where Python branches on what changes at most calls: each would be recorded to no end."""
        self._in_vain += 1
        if self._in_vain > MOST_IN_VAIN and 2 * self._in_vain > self._calls and hasattr(self.optimizer, "param_groups"):
            names = self.record.entry.varying.changing()
            raise self.weights.bridge.CannotRecord(
                f"{self.record.name}: Python branches on {names}, which changes from call to call: compute with "
                "torch.where on a tensor of the batch instead"
            )

    def _program(self, graph: Any, leaves: list, trained: Sequence[str], updating: bool, divisor: int) -> Callable:
        jax_settings.check()
        weights, averaging = self.weights, self.averaging
        reached = weights.reached(graph, self.record.name)
        moved = [key for key in trained if key in reached]  # torch leaves out a parameter without a gradient
        forwards = self._forwards(graph) if averaging else ()
        weights.replicas.check_parameters()
        unreached = averaging.unreached(forwards, reached) if averaging else {}
        unread = graph.unread_inputs()
        arrays = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and i not in unread]
        constants = {i: leaf for i, leaf in enumerate(leaves) if i not in arrays}
        logged: list[str] = []  # names of the values beside the loss, in the user's order

        def compute(arrays_now: Arrays, inputs, key):
            given = [constants.get(i) for i in range(len(leaves))]
            for place, value in zip(arrays, inputs, strict=True):
                given[place] = value

            def loss_of(params: Arrays):
                state = weights.state({**arrays_now, **self.precision.for_compute(params)})
                loss, parts, changed = self.record.run(graph, state, given, Rngs(key))
                logged[:] = parts
                return loss.astype(jnp.float32), (list(parts.values()), changed)

            params = {name: arrays_now[name] for name in moved}
            (loss, (parts, changed)), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
            changed = {weights.first_name(name): value for name, value in changed.items()}
            kept = lambda value, like: value if value.dtype == like.dtype else jnp.asarray(value, like.dtype)
            buffers = {name: kept(value, arrays_now[name]) for name, value in changed.items()}
            return loss, parts, grads, buffers

        def accumulate(arrays_now, opt_state, grads, inputs, numbers, limit, count):
            key = jax.random.fold_in(self.key, count)  # inside: a call of its own would cost more than the rest
            loss, parts, new, buffers = compute(arrays_now, inputs, key)
            grads = grads | {name: grads[name] + value if name in grads else value for name, value in new.items()}
            return (arrays_now | buffers, opt_state, grads), (loss, parts, None)

        def step(arrays_now, opt_state, grads, inputs, numbers, limit, count):
            state, (loss, parts, _) = accumulate(arrays_now, opt_state, grads, inputs, numbers, limit, count)
            state, norm = self._update(*state, numbers, limit, divisor)
            return state, (loss, parts, norm)

        apart = averaging is not None  # processes meet between gradients and update
        sums = apart or not updating
        function, donated = (accumulate, (0, 1, 2)) if sums else (step, (0, 1))  # an update gives no gradients back
        doubt = "" if apart else graph.may_raise
        compiled = OnlyFinite(function, sums) if doubt else jax.jit(function, donate_argnums=donated)

        def run(leaves):
            graph.check_indices(leaves)  # raises where torch would
            inputs = [weights.place(leaves[i]) for i in arrays]
            if averaging:
                averaging.receive_buffers(forwards)
                self.grads = averaging.begin(forwards, unreached, self.grads)
            updated = {*moved, *self.grads} if self.grads else moved
            numbers = self.updates.numbers()
            limit = None if self.clip_norm is None else np.float32(self.clip_norm)
            given = weights.arrays, self.opt_state, self.grads, inputs, numbers, limit, np.uint32(self.count)
            with weights.exchange.products():
                state, (loss, parts, norm) = compiled(*given)
            weights.queue.put(loss, inputs)
            weights.arrays, self.opt_state, self.grads = state
            weights.move_ahead()
            if doubt and compiled.failed:
                raise weights.bridge.MayRaise(doubt)
            if averaging and updating:
                grads = averaging.settle(self.grads)
                updated = list(grads)
                state, norm = self._apart(divisor)(weights.arrays, self.opt_state, grads, numbers, limit)
                weights.arrays, self.opt_state, self.grads = state
            self.count += 1
            if updating:
                began = not self.updates.ahead
                self.updates.after(updated)
                if began and self.updates.ahead:
                    self._await_state()
                if self.scheduler is not None:
                    self.scheduler.step()
            self.grad_norm = None if norm is None else weights.lazy.LazyScalar(norm)
            self.parts = dict(zip(logged, map(weights.lazy.LazyScalar, parts), strict=True))
            return (weights.lazy.LazyScalar(loss), self.parts) if parts else weights.lazy.LazyScalar(loss)

        return run

    def _forwards(self, graph: Any) -> Sequence[tuple[str, bool]]:
        """The calls of DistributedDataParallel modules in a loss. Raises CannotRecord where torch's exchange something
        between them."""
        weights = self.weights
        forwards = self.record.forwards[id(graph)]
        changed = {id(weights.tensors[weights.first_name(name)]) for name in graph.changed}
        twice = weights.replicas.exchanges_twice(forwards, changed)
        if twice is not None:
            raise weights.bridge.CannotRecord(
                f"{self.record.name} calls {twice} more than once, whose DistributedDataParallel gives its buffers out "
                "anew before each call (broadcast_buffers=False leaves them to each process)"
            )
        return forwards

    def _update(self, arrays_now: Arrays, opt_state, grads: Arrays, numbers, limit, divisor: int) -> tuple:
        """Clip the gradients and update the parameters that have one: the state after it, and the norm. Traced."""
        if divisor > 1:
            grads = {name: value / divisor for name, value in grads.items()}
        norm = None
        if limit is not None:
            norm = global_norm(grads)
            grads = clip(grads, norm, limit)
        moved = {name: arrays_now[name] for name in self.updates.keys if name in grads}
        params, opt_state = self.updates.compiled(list(moved))(grads, opt_state, moved, numbers)
        return (arrays_now | params, opt_state, {}), norm

    def _apart(self, divisor: int) -> Callable:
        """The update as a program of its own, for gradients that the processes have averaged."""
        key = "update", divisor, self.updates.switches()
        if key not in self._programs:
            update = functools.partial(self._update, divisor=divisor)
            self._programs[key] = jax.jit(update, donate_argnums=(0, 1))
        return self._programs[key]

    def eval(self, name: str | None = None) -> Callable:
        """A compiled forward pass of the module (of `name`, where there are several) in evaluation mode.

        It takes what the module takes and gives torch tensors, always with the newest weights.
        """
        name = next(iter(self.weights.modules)) if name is None else name
        if name not in self.weights.modules:
            raise UserError(f"eval: no module {name!r}; there are {', '.join(self.weights.modules)}")
        return CompiledForward(self, name)

    def sync(self, overwrite: bool = False) -> None:
        """Put weights, buffers and the optimizer's state back into the torch objects.

        Raises UserError for weights that torch has changed since the last sync, other than right after it, and for
        large constants that were changed unseen; overwrite: drop the changes of weights, keep what was trained.
        """
        if self.torch is None and not overwrite:
            self.record.check_captured(ended=True)
        self.write(overwrite)

    @property
    def ahead(self) -> bool:
        """Return True while torch's modules or optimizer hold older values."""
        return self.weights.dirty or self.updates.ahead

    def _await_state(self) -> None:
        """Have torch's code that reads or writes the optimizer's state find the newest; it exists from the first update
        on."""
        if self._state_awaited is None:
            self.updates.write_back(self.opt_state)
        exchange = self.weights.exchange
        self._state_awaited = exchange.Awaited(exchange.state_tensors(self.optimizer), self._bring_up_to_date)
        if self.updates.ahead:
            self._state_awaited.hold()

    def _write_state(self) -> None:
        if self._state_awaited is not None:
            self._state_awaited.release()
        self.updates.write_back(self.opt_state)

    def _bring_up_to_date(self) -> None:
        """Before torch's code reads or changes the optimizer's state."""
        if self.ahead:
            self.write()

    def write(self, overwrite: bool = False) -> None:
        """Put them back as `sync`, whatever the constants of the record are by now."""
        self.weights.sync(overwrite)
        self._write_state()

    def state_dict(self) -> dict[str, Any]:
        """All that a loop needs to go on, in torch's own forms: module, optimizer, scheduler, count. Syncs first."""
        self.sync()
        modules = {name: module.state_dict() for name, module in self.weights.modules.items()}
        state = {"module": modules if len(modules) > 1 else next(iter(modules.values())), "count": self.count}
        if hasattr(self.optimizer, "state_dict"):
            state["optimizer"] = self.optimizer.state_dict()
        else:
            leaves, _ = jax.tree.flatten(self.opt_state)
            state["optimizer"] = [np.asarray(leaf) for leaf in leaves]
        if self.scheduler is not None:
            state["scheduler"] = self.scheduler.state_dict()
        waiting = self.grads if self.torch is None else self.torch.gradients()
        state["grads"] = {name: np.asarray(value) for name, value in waiting.items()}
        if self.averaging and waiting:
            state |= {"due": sorted(self.averaging.due), "process": self.weights.replicas.process}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`: the next call gives the same bits as if the loop had not stopped."""
        weights = self.weights
        if self.averaging:
            if state.get("process", weights.replicas.process) != weights.replicas.process:
                raise UserError(
                    f"load_state_dict: gradients wait in this state, and they are those of process {state['process']} "
                    f"alone, not of {weights.replicas.process}: save it after an update, or one in each process"
                )
            self.averaging.due = set(state.get("due", ()))
        weights.forget()
        modules = state["module"] if len(weights.modules) > 1 else {next(iter(weights.modules)): state["module"]}
        for name, module in weights.modules.items():
            module.load_state_dict(modules[name])
        weights.read(weights.tensors)
        if hasattr(self.optimizer, "load_state_dict"):
            self.optimizer.load_state_dict(state["optimizer"])
            self.opt_state = self.updates.state({key: weights.arrays[key] for key in self.updates.keys})
        else:
            structure = jax.tree.structure(self.opt_state)
            self.opt_state = jax.tree.unflatten(structure, [jnp.asarray(leaf) for leaf in state["optimizer"]])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.torch is None:
            self.grads = {name: jnp.asarray(value) for name, value in state["grads"].items()}
        else:
            self.torch.set_gradients(state["grads"])
        self.count = state["count"]
