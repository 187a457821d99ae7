"""One compiled update of shared weights, and several of them."""

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxtrain.compiled_step import leftovers
from jaxtrain.compiled_step.averaging import Averaging
from jaxtrain.compiled_step.capture import Capture
from jaxtrain.compiled_step.first_look import FirstLook
from jaxtrain.compiled_step.forward import CompiledForward
from jaxtrain.compiled_step.seen_shapes import MANY, SeenShapes
from jaxtrain.compiled_step.shared_weights import Arrays, SharedWeights
from jaxtrain.compiled_step.step_program import StepProgram, compile_update
from jaxtrain.compiled_step.torch_updates import TorchUpdates, take_over
from jaxtrain.errors import NoCounterpart, UserError
from jaxtrain.optim.several import OptimizerList, SchedulerList, SeveralUpdates
from jaxtrain.optim.torch_optimizer import OptaxUpdate, TorchUpdate, UpdateInTorch, Updates
from jaxtrain.runtime.waits import PATIENCE_S, PATIENCE_STEPS, Waits

if TYPE_CHECKING:
    from torch_bridge.evaluated_module import EvaluatedModule

MOST_IN_VAIN = 16  # recordings that only gave a graph already known; with more, torch takes over


class CompiledStep:
    """One compiled update, made by `compile` and `compile_many`.

    count: calls so far. clip_norm: may be changed. clipped: a module whose parameters alone are clipped and counted in
    the norm; None: all that the optimizer holds. Set before the first call, and for `prepare` alone.
    """

    clipped: Any = None

    def __init__(
        self, index: int, weights: SharedWeights, loss_fn, optimizer, scheduler, accumulate, precision, clip_norm
    ):
        self.weights, self.optimizer, self.scheduler = weights, optimizer, scheduler
        self.key = jax.random.fold_in(weights.key, index)
        self.accumulate, self.precision, self.clip_norm = accumulate, precision, clip_norm
        self._loss_fn = loss_fn
        self.capture: Any = None
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
        self.refusals = weights.bridge.Refusals()
        self.waits = Waits(getattr(loss_fn, "__name__", "the loss"), weights.bridge.errors.line_in)
        self.look: FirstLook | None = None  # at the first call
        self.torch_s: float | None = None  # of a step that torch has run
        self._compares = False  # this call may give compiling up
        self.count = self._calls = self._in_vain = 0  # in vain: recordings of a known graph
        self.shapes, self.items = SeenShapes(), weights.bridge.BatchItems(getattr(loss_fn, "__name__", "the loss"))
        self._forwards: dict[str, tuple[CompiledForward, EvaluatedModule]] = {}
        self.parts: dict[str, Any] = {}
        self.grad_norm: Any = None

    def _look(self) -> Updates:
        """Read the current modules and optimizer; return the updates for this kind of optimizer."""
        weights, optimizer = self.weights, self.optimizer
        self.generation, self._state_awaited = weights.generation, None
        self.record_anew(weights.edits.structure_of(weights.submodules))
        updates: Updates
        if hasattr(optimizer, "param_groups"):
            weights.admit(parameter for group in optimizer.param_groups for parameter in group["params"])
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
        self.opt_state = self._state_of(updates)
        self.averaging = Averaging(weights, updates.keys) if weights.replicas.averaged else None
        return updates

    @property
    def loss_fn(self) -> Callable:
        """The loss of each call; a new one is recorded at the next."""
        return self._loss_fn

    @loss_fn.setter
    def loss_fn(self, loss_fn: Callable) -> None:
        self._loss_fn, self.capture = loss_fn, None
        self.record_anew()

    def record_anew(self, structure: tuple | None = None) -> None:
        """Drop all graphs and programs. structure: the modules' hooks and replaced forwards, if they have changed."""
        self.structure = self.structure if structure is None else structure
        self._record: Any = None
        self.capture = Capture(self, self.capture)
        self._programs: dict[Any, Any] = {}
        self._ways: dict[Any, list[StepProgram]] = {}  # one program per way that Python's numbers take in the loss

    @property
    def record(self) -> Any:
        """The record of the loss, made when Dynamo does not capture it. Raises CannotRecord if what the loss reads
        cannot be looked at."""
        if self._record is None:
            weights = self.weights
            self._record = weights.bridge.LossRecord(weights.modules, self.loss_fn, weights.replicas)
        return self._record

    def refresh(self) -> None:
        """Read what torch or another step has changed: weights, optimizer state, parameter groups, parameters."""
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
            self._write_state()
            self._state_awaited = None
            self.opt_state = self._state_of(self.updates)

    def _state_of(self, updates: Updates) -> Any:
        """Return the optimizer's current state on the devices, as a program returns it: with another placement, jax.jit
        would compile the step again at its second call."""
        weights = self.weights
        return weights.placed_state(updates.state({key: weights.arrays[key] for key in updates.keys}))

    def __call__(self, batch: Any, update: bool | None = None) -> Any:
        """Run a step on a batch of tensors or arrays; return the loss, or (loss, values to log), as loss_fn does.

        Every `accumulate`-th call updates the weights with the mean of the gradients. update: True or False decides it
        for this call instead; gradients are then summed, as by backward(). Numbers that the loss reads from Python
        (attributes, variables around it) may change. A call that cannot be one program (it keeps something in Python,
        or branches on values) runs in torch, as the first may do; if the next cannot either, torch runs all later ones
        around the compiled modules, and a warning says why. Raises torch's own error for a batch or a loss that torch
        cannot run either, and UserError for anything that is refused.
        """
        if not self.count and self.clip_norm is None:
            leftovers.tell_clipping()
        if self.torch is None:
            refused = None
            try:
                self._compares = True
                if self.look is None:
                    self.look = FirstLook(self)
                self.look.ask()
                with contextlib.suppress(self.weights.bridge.NotCaptured):
                    return self.captured(batch, update)
                call = self.prepare(batch, update)
                reason = self.changes
                if not reason or not hasattr(self.optimizer, "param_groups"):
                    found = call()
                    self.refusals.recorded()
                    self.items.recorded()
                    return found
            except self.weights.bridge.CannotRecord as error:
                if self.items.give_up(error):
                    return self(batch, update)
                if not hasattr(self.optimizer, "param_groups"):
                    raise
                refused, reason = error, self.weights.bridge.reason_of(error)
            finally:
                self._compares = False
            return take_over(self, batch, update, reason, refused)
        return self.torch(batch, update)

    def captured(self, batch: Any, update: bool | None = None) -> Any:
        """Run a call as `step(batch, update)` does, if Dynamo captures its loss. Raises NotCaptured or, for what torch
        has to run, CannotRecord, when nothing of it has run."""
        if self.capture.refused is not None:
            raise self.capture.refused
        in_torch = self.updates.reason if isinstance(self.updates, UpdateInTorch) else ""
        if reason := in_torch or self.weights.bridge.watched_in_torch():
            raise self.weights.bridge.NotCaptured(reason)
        self.weights.bridge.check_gradients_on(self.capture.loss.name)
        with self.weights.exchange.plainly():
            self.refresh()
            structure = self.weights.edits.structure_of(self.weights.submodules)
            trained = self.updates.trained()
        if structure != self.structure:
            self.record_anew(structure)
        self._calls += 1
        found = self.capture(batch, *self._sums(update), trained)
        self.refusals.recorded()
        return found

    @property
    def programs(self) -> list[Any]:
        """Return the compiled programs so far, each once."""
        recorded = {id(program): program for program in self._programs.values()}
        return [*self.capture.programs, *recorded.values()]

    def explain(self) -> str:
        """Describe how the calls so far have run: the graphs that were captured and why each but the first was, why
        none is captured, with the line of the code, and whether the loss is recorded instead or torch runs it."""
        lines = [self.capture.explain()]
        if self._programs:
            lines.append(f"{self.capture.loss.name}: recorded by torch.export, {len(self._programs)} programs")
        if self.torch is not None:
            lines.append(f"{self.capture.loss.name}: torch runs it: {self.torch.reason}")
        return "\n".join(lines)

    def _sums(self, update: bool | None) -> tuple[bool, int]:
        """Return whether a call updates the weights, and by what it divides the summed gradients."""
        updating = (self.count + 1) % self.accumulate == 0 if update is None else update
        return updating, self.accumulate if update is None else 1

    @property
    def changes(self) -> str:
        """Describe what the loss changes in Python; "" for nothing. Known once a call is prepared."""
        left = ", ".join(sorted(self.record.left)[:3])
        return left and f"{self.record.name} changes {left} in Python"

    def prepare(self, batch: Any, update: bool | None = None) -> Callable[[], Any]:
        """Record and build what this call needs, if it is new; return the call. Raises UserError as the call does."""
        leaves, spec, batch_type = self.weights.bridge.flatten(batch, self.items)
        with self.weights.exchange.plainly():  # nothing here reads a tensor's values
            self.refresh()
            self.weights.replicas.check()
            modes = self.weights.bridge.flags_of(self.weights.submodules)
            structure = self.weights.edits.structure_of(self.weights.submodules)
            trained, switches = self.updates.trained(), self.updates.switches()
        if structure != self.structure:  # hooks were added or removed
            self.record_anew(structure)
        if isinstance(self.updates, UpdateInTorch):
            raise self.weights.bridge.CannotRecord(self.updates.reason)
        if watched := self.weights.bridge.watched_in_torch():
            raise self.weights.bridge.CannotRecord(watched)
        self.record.check_captured()
        self._calls += 1
        updating, divisor = self._sums(update)
        forms = self.weights.bridge.forms(leaves)
        key = (spec, batch_type, modes, trained, switches, updating, divisor, forms)
        python, numbers = self.record.python()
        ways = self._ways.get((python, key), ())
        program = next((way for way in ways if way.graph.host.answers([*leaves, *numbers])), None)
        if program is None:
            self._note(forms)
            self.compare_costs()
            with self.waits.during("is recorded"):
                graph, numbers = self.record.graph(leaves, spec, modes, batch_type)
            self.weights.widen(graph.counters)
            self.weights.tell_rounded(graph.changed)
            given = graph.host.given([*leaves, *numbers])
            if unfit := graph.unfit(given, self.weights.state(self.weights.arrays)):
                raise self.weights.bridge.CannotRecord(f"{self.record.name}: {unfit}")
            program = self._programs.get((id(graph), key))  # other Python values may have led to the same graph
            if program is None:
                program = StepProgram(self, graph, given, trained, updating, divisor)
            else:
                self._recorded_in_vain()
            self._programs[id(graph), key] = program
            self._ways.setdefault((self.record.python()[0], key), []).append(program)
        if self.weights.bridge.register_late(self.record.left, self.weights.modules):
            return self.prepare(batch, update)  # again, with the hooks that it has just registered
        given = program.graph.host.given([*leaves, *numbers])
        return lambda: program(given)

    def note_shapes(self, shapes: tuple) -> None:
        """Raise CannotRecord if nearly every batch has a new shape."""
        self.shapes.note(shapes, self._calls)
        if self.shapes.endless and hasattr(self.optimizer, "param_groups"):
            raise self.weights.bridge.CannotRecord(
                f"{MANY} batches have come in as many shapes: pad them to a few in the collate function"
            )

    def _note(self, forms: tuple) -> None:
        """Raise CannotRecord if nearly every batch has a new shape, or new values that Python reads: each would be
        compiled for a single call."""
        if hasattr(self.optimizer, "param_groups"):
            self.items.check()
        self.note_shapes(tuple(form for form in forms if isinstance(form[0], tuple)))

    def compare_costs(self) -> None:
        """Raise StaysInTorch if compiling has cost more than PATIENCE_STEPS steps in torch besides those that have run
        compiled, and CannotRecord for torch to run, and time, one first."""
        spent_s = self.waits.spent_s
        if not self._compares or spent_s < PATIENCE_S or isinstance(self.updates, OptaxUpdate):
            return
        if self.torch_s is None:
            raise self.weights.bridge.errors.RunsOnceInTorch(
                f"compiling has taken {spent_s:.0f} s, and a step in torch is timed"
            )
        if self.waits.cost_more(self.torch_s, self.count):
            raise self.weights.bridge.errors.StaysInTorch(
                f"{self.record.name}: compiling has taken {spent_s:.0f} s, more than {PATIENCE_STEPS} steps in "
                f"torch would ({self.torch_s:.2g} s each), and this batch needs another program"
            )

    def _recorded_in_vain(self) -> None:
        """Raise CannotRecord if Python branches on a value that changes at most calls: each would be recorded again."""
        self._in_vain += 1
        if self._in_vain > MOST_IN_VAIN and 2 * self._in_vain > self._calls and hasattr(self.optimizer, "param_groups"):
            raise self.weights.bridge.CannotRecord(
                f"{self.record.name}: {self.record.entry.varying.described()}, which changes from call to call: make "
                "objects once, and compute with torch.where on a tensor of the batch"
            )

    def update_program(self, divisor: int) -> Callable:
        """Return the update as a separate program, for gradients that the processes have averaged."""
        key = "update", divisor, self.updates.switches()
        if key not in self._programs:
            self._programs[key] = compile_update(self, divisor)
        return self._programs[key]

    def clipped_names(self) -> set[str] | None:
        """Return the names of the parameters whose gradients are clipped; None for all."""
        if self.clipped is None:
            return None
        names = self.weights.names
        return {names[id(parameter)] for parameter in self.clipped.parameters() if id(parameter) in names}

    def after_call(self, updated: list[str] | None) -> None:
        """Count a call and finish its update. updated: the parameters that were updated; None if it does not update."""
        self.count += 1
        if updated is None:
            return
        began = not self.updates.ahead
        self.updates.after(updated)
        if began and self.updates.ahead:
            self._await_state()
        if self.scheduler is not None:
            self.scheduler.step()

    def eval(self, name: str | None = None) -> "EvaluatedModule":
        """Return the module (`name`, if there are several) in evaluation mode, with a compiled forward pass.

        It behaves as the module: a call takes its arguments and returns torch tensors, computed with the newest
        weights; parameters(), state_dict() and its own attributes are the module's. The mode in which the step trains
        stays as it is. All calls for one module give the same object, which keeps its programs.
        """
        name = next(iter(self.weights.given)) if name is None else name
        if name not in self.weights.given:
            raise UserError(f"eval: no module {name!r}; there are {', '.join(self.weights.given)}")
        forward, evaluated = self._forwards.get(name, (None, None))
        if forward is None or evaluated is None or forward.generation != self.weights.generation:
            from torch_bridge.evaluated_module import EvaluatedModule

            forward = CompiledForward(self, name)
            evaluated = EvaluatedModule(forward.module, forward)
            self._forwards[name] = forward, evaluated
        return evaluated.eval()

    def sync(self, overwrite: bool = False) -> None:
        """Write weights, buffers and optimizer state back into the torch objects.

        Raises UserError if torch has changed a weight while the devices held newer values, and if a large constant was
        changed unnoticed. overwrite: drop torch's changes of weights, keep the trained values.
        """
        if self.torch is None and self._record is not None and not overwrite:
            self.record.check_captured(ended=True)
        self.write(overwrite)

    @property
    def ahead(self) -> bool:
        """Return True while torch's modules or optimizer hold older values."""
        return self.weights.dirty or self.updates.ahead

    def _await_state(self) -> None:
        """Make torch code that reads or writes the optimizer's state find the newest values. The state exists from the
        first update on; its values take memory in torch once they are read."""
        if self._state_awaited is None:
            self.updates.create(self.opt_state)
        exchange = self.weights.exchange
        self._state_awaited = exchange.Awaited(exchange.state_tensors(self.optimizer), self._bring_up_to_date)
        if self.updates.ahead:
            self._state_awaited.hold()

    def _write_state(self) -> None:
        if self._state_awaited is not None:
            self._state_awaited.release()
        self.updates.write_back(self.opt_state)

    def _bring_up_to_date(self) -> None:
        """Write the newest values before torch code reads or changes the optimizer's state."""
        if self.ahead:
            self.write()

    def write(self, overwrite: bool = False) -> None:
        """Write back as `sync` does, without checking the constants of the record."""
        self.weights.sync(overwrite)
        self._write_state()

    def state_dict(self) -> dict[str, Any]:
        """Return what a loop needs to resume, in torch's formats: module, optimizer, scheduler, count. Syncs first."""
        self.sync()
        modules = {name: module.state_dict() for name, module in self.weights.given.items()}
        state = {"module": modules if len(modules) > 1 else next(iter(modules.values())), "count": self.count}
        if self.weights.loose is not None:
            state["loose"] = self.weights.loose.state_dict()
        if hasattr(self.optimizer, "state_dict"):
            state["optimizer"] = self.optimizer.state_dict()
        else:
            state["optimizer"] = [np.asarray(leaf) for leaf in jax.tree.leaves(self.opt_state)]
        if self.scheduler is not None:
            state["scheduler"] = self.scheduler.state_dict()
        waiting = self.grads if self.torch is None else self.torch.gradients()
        state["grads"] = {name: np.asarray(value) for name, value in waiting.items()}
        if self.averaging and waiting:
            state |= {"due": sorted(self.averaging.due), "process": self.weights.replicas.process}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict()`: the next call gives the same bits as if the loop had not stopped."""
        weights = self.weights
        if self.averaging:
            if state.get("process", weights.replicas.process) != weights.replicas.process:
                raise UserError(
                    f"load_state_dict: gradients wait in this state, and they are those of process {state['process']} "
                    f"alone, not of {weights.replicas.process}: save it after an update, or one in each process"
                )
            self.averaging.due = set(state.get("due", ()))
        weights.forget()
        modules = state["module"] if len(weights.given) > 1 else {next(iter(weights.given)): state["module"]}
        for name, module in weights.given.items():
            module.load_state_dict(modules[name])
        if weights.loose is not None:
            weights.loose.load_state_dict(state["loose"])
        weights.read(weights.tensors)
        if hasattr(self.optimizer, "load_state_dict"):
            self.optimizer.load_state_dict(state["optimizer"])
            self.opt_state = self._state_of(self.updates)
        else:
            structure = jax.tree.structure(self.opt_state)
            self.opt_state = weights.placed_state(jax.tree.unflatten(structure, state["optimizer"]))
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.torch is None:
            self.grads = weights.placed(state["grads"])
        else:
            self.torch.set_gradients(state["grads"])
        self.count = state["count"]
