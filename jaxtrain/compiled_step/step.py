"""One compiled update of shared weights, and several of them."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax

from jaxtrain.compiled_step import leftovers
from jaxtrain.compiled_step.capture import Capture, NotYet
from jaxtrain.compiled_step.first_look import FirstLook
from jaxtrain.compiled_step.forward import CompiledForward
from jaxtrain.compiled_step.meanwhile import Meanwhile
from jaxtrain.compiled_step.seen_shapes import MANY, SeenShapes
from jaxtrain.compiled_step.shared_weights import Arrays, SharedWeights
from jaxtrain.compiled_step.torch_updates import TorchUpdates, take_over
from jaxtrain.compiled_step.update import compile_update
from jaxtrain.errors import NoCounterpart, UserError
from jaxtrain.optim.several import OptimizerList, SchedulerList, SeveralUpdates
from jaxtrain.optim.torch_optimizer import OptaxUpdate, TorchUpdate, UpdateInTorch, Updates
from jaxtrain.runtime import lockstep
from jaxtrain.runtime.waits import PATIENCE_S, PATIENCE_STEPS, Waits
from torch_bridge.lazy_array import to_host

if TYPE_CHECKING:
    from torch_bridge.evaluated_module import EvaluatedModule


class CompiledStep:
    """One compiled update, made by `compile` and `compile_many`.

    count: calls so far. clip_norm: may be changed. wait: for programs, instead of computing in torch while XLA compiles
    them; may be changed. clipped: a module whose parameters alone are clipped and counted in the norm; None: all that
    the optimizer holds. Set before the first call.
    """

    clipped: Any = None

    def __init__(
        self, index: int, weights: SharedWeights, loss_fn, optimizer, scheduler, accumulate, precision, clip_norm, wait
    ):
        self.weights, self.optimizer, self.scheduler = weights, optimizer, scheduler
        self.key = jax.random.fold_in(weights.key, index)
        self.accumulate, self.precision, self.clip_norm, self.wait = accumulate, precision, clip_norm, wait
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
        self.meanwhile = Meanwhile(self)
        self.refusals = weights.bridge.Refusals()
        self.refused: UserError | None = None  # why torch has run the last call that it ran
        self.differentiated: frozenset[int] = frozenset()  # tensors of a batch that the loss differentiates by
        self.waits = Waits(getattr(loss_fn, "__name__", "the loss"), weights.bridge.errors.line_in)
        self.look: FirstLook | None = None  # at the first call
        self.torch_s: float | None = None  # of a step that torch has run
        self._compares = False  # this call may give compiling up
        self.count = self._calls = 0
        self.shapes = SeenShapes()
        self._forwards: dict[str, tuple[CompiledForward, EvaluatedModule]] = {}
        self.parts: dict[str, Any] = {}
        self.grad_norm: Any = None

    def _look(self) -> Updates:
        """Read the current modules and optimizer; return the updates for this kind of optimizer."""
        weights, optimizer = self.weights, self.optimizer
        self.generation, self._state_awaited = weights.generation, None
        self.capture_anew(weights.edits.structure_of(weights.submodules))
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
        return updates

    @property
    def loss_fn(self) -> Callable:
        """The loss of each call; a new one is captured at the next."""
        return self._loss_fn

    @loss_fn.setter
    def loss_fn(self, loss_fn: Callable) -> None:
        self._loss_fn, self.capture = loss_fn, None
        self.capture_anew()

    def capture_anew(self, structure: tuple | None = None) -> None:
        """Drop all graphs and programs. structure: the modules' hooks and replaced forwards, if they have changed."""
        self.structure = self.structure if structure is None else structure
        self.capture = Capture(self, self.capture)
        self._updates_alone: dict[Any, Callable] = {}

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

        Every `accumulate`-th call updates the weights with the mean of the gradients. Numbers that the loss reads from
        Python (attributes, variables around it) may change. Torch runs the calls while XLA compiles. A call that cannot
        be one program (it keeps something in Python, or branches on values) runs in torch, as the first may do; if the
        next cannot either, torch runs all later ones around the compiled modules, and a warning says why.

        Args:
            batch: what loss_fn takes.
            update: True or False decides whether this call updates; gradients are summed, as by backward().

        Raises:
            UserError: for anything that is refused. What torch cannot run either is its own error.
        """
        if not self.count and self.clip_norm is None:
            leftovers.tell_clipping()
        if self.torch is None:
            try:
                self._compares = True
                if self.look is None:
                    self.look = FirstLook(self)
                self.look.ask()
                return self.captured(batch, update)
            except (self.weights.bridge.NotCaptured, self.weights.bridge.CannotRecord) as error:
                if not hasattr(self.optimizer, "param_groups"):
                    raise
                if self.weights.rows is not None:
                    raise UserError(
                        f"a step over {jax.process_count()} processes has to be one program, and this one cannot be: "
                        f"{self.weights.bridge.reason_of(error)}. One process drives all devices of its machine: start "
                        "it alone, or wrap the module in DistributedDataParallel"
                    ) from error
                refused = error
            finally:
                self._compares = False
            self.refused = refused
            return take_over(self, batch, update, refused)
        return self.torch(batch, update)

    def captured(self, batch: Any, update: bool | None = None) -> Any:
        """Run a call as `step(batch, update)` does, if Dynamo captures its loss; in torch, while XLA compiles. Raises
        NotCaptured or, for what torch has to run, CannotRecord, when nothing of it has run."""
        if self.capture.refused is not None:
            raise self.capture.refused
        in_torch = self.updates.reason if isinstance(self.updates, UpdateInTorch) else ""
        if reason := in_torch or self.weights.bridge.watched_in_torch():
            raise self.weights.bridge.NotCaptured(reason)
        self.weights.bridge.check_gradients_on(getattr(self.loss_fn, "__name__", type(self.loss_fn).__name__))
        if self.meanwhile.runs(batch):
            return self.meanwhile(batch, update)
        with self.weights.exchange.plainly():
            self.refresh()
            structure = self.weights.edits.structure_of(self.weights.submodules)
            trained = self.updates.trained()
        if structure != self.structure:
            self.capture_anew(structure)
        self._calls += 1
        if self.differentiated:
            self.weights.bridge.begin_gradients(batch, self.differentiated)
        try:
            with self.meanwhile.capturing(batch):
                result = self.capture(batch, *self._sums(update), trained)
        except NotYet as error:
            self.meanwhile.pending = error.compilation
            result = self.meanwhile(batch, update)
        self.refusals.recorded()
        self.refused = None
        return result

    @property
    def programs(self) -> list[Any]:
        """Return the compiled programs so far, each once."""
        return self.capture.programs

    def __repr__(self) -> str:
        runs = f"programs: {len(self.programs)}" if self.torch is None else "torch runs it"
        return f"CompiledStep({self.capture.loss.name}, calls: {self.count}, {runs})"

    def __rich_repr__(self) -> Iterator[tuple[str | None, Any]]:
        """Yield what rich shows of it in a terminal, a line for each."""
        yield None, self.capture.loss.name
        yield "calls", self.count
        yield "programs", len(self.programs)
        yield "runs", self.explain().splitlines()

    def explain(self) -> str:
        """Describe how the calls so far have run: the graphs that were captured and why each but the first was, why
        none is captured, with the line of the code, and whether torch runs the loss."""
        name, lines = self.capture.loss.name, self.capture.explain()
        if self.refused is not None:
            lines.append(f"{name}: not captured: {self.refused}")
        if self.meanwhile.why:
            lines.append(f"{name}: torch runs it: {self.meanwhile.why}")
        if self.torch is not None:
            lines.append(f"{name}: torch runs it: {self.torch.reason}")
        return "\n".join(lines) or f"{name}: nothing is captured before the first call"

    def _sums(self, update: bool | None) -> tuple[bool, int]:
        """Return whether a call updates the weights, and by what it divides the summed gradients."""
        updating = (self.count + 1) % self.accumulate == 0 if update is None else update
        return updating, self.accumulate if update is None else 1

    def note_shapes(self, shapes: tuple) -> None:
        """Raise CannotRecord if nearly every batch has a new shape."""
        self.shapes.note(shapes, self._calls)
        if self.shapes.endless and self.weights.rows is None and hasattr(self.optimizer, "param_groups"):
            raise self.weights.bridge.CannotRecord(
                f"{MANY} batches have come in as many shapes: pad them to a few in the collate function"
            )

    def compare_costs(self) -> None:
        """Raise StaysInTorch if compiling has cost more than PATIENCE_STEPS steps in torch besides those that have run
        compiled, and CannotRecord for torch to run, and time, one first."""
        spent_s = self.waits.spent_s
        alone = isinstance(self.updates, OptaxUpdate) or self.weights.rows is not None  # torch cannot run such a step
        if not self._compares or spent_s < PATIENCE_S or alone:
            return
        if self.torch_s is None:
            raise self.weights.bridge.errors.RunsOnceInTorch(
                f"compiling has taken {spent_s:.0f} s, and a step in torch is timed"
            )
        if self.waits.cost_more(self.torch_s, self.count):
            raise self.weights.bridge.errors.StaysInTorch(
                f"{self.capture.loss.name}: compiling has taken {spent_s:.0f} s, more than {PATIENCE_STEPS} steps in "
                f"torch would ({self.torch_s:.2g} s each), and this batch needs another program"
            )

    def update_program(self, divisor: int) -> Callable:
        """Return the update as a separate program, for gradients that other programs have computed."""
        key = divisor, self.updates.switches()
        if key not in self._updates_alone:
            self._updates_alone[key] = compile_update(self, divisor)
        return self._updates_alone[key]

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

        Raises UserError if torch has changed a weight while the devices held newer values. overwrite: drop torch's
        changes of weights, keep the trained values.
        """
        self.weights.sync(overwrite)
        self._write_state()

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
        if self.updates.ahead and self.weights.layout.splits:
            self.weights.take_turn({lockstep.NEXT: "the optimizer's state is gathered"})
        self.updates.write_back(self.opt_state)

    def _bring_up_to_date(self) -> None:
        """Write the newest values before torch code reads or changes the optimizer's state."""
        if self.ahead:
            self.sync()

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
            state["optimizer"] = [to_host(leaf) for leaf in jax.tree.leaves(self.opt_state)]
        if self.scheduler is not None:
            state["scheduler"] = self.scheduler.state_dict()
        waiting = self.grads if self.torch is None else self.torch.gradients()
        state["grads"] = {name: to_host(value) for name, value in waiting.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict()`: the next call gives the same bits as if the loop had not stopped."""
        weights = self.weights
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
        self.wait = True  # the step before has used programs, and the bits are theirs
