"""A compiled step whose loss TorchDynamo captures: the first way in which `CompiledStep` tries to run a call."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.compiled_step.finite import OnlyFinite
from jaxtrain.compiled_step.turns import word_of
from jaxtrain.compiled_step.update import update
from jaxtrain.optim.torch_optimizer import OptaxUpdate
from jaxtrain.runtime import jax_settings
from jaxtrain.runtime.background import Compilation, compile_later
from jaxtrain.runtime.prng import Rngs

FIRST_TORCH = (2, 13)  # as torch_bridge.capture.torch_api has it
ARRAYS = {"torch", "numpy", "jax", "jaxlib"}  # packages whose objects may be asked for a shape
MOST_SHORT = 2  # captures in a row that serve a single call each


def why_not(step: Any) -> str:
    """Return why Dynamo is not asked for a step's loss; "" if it is."""
    weights = step.weights
    major, minor = map(int, weights.bridge.torch.__version__.split(".")[:2])
    if (major, minor) < FIRST_TORCH:
        return f"torch {major}.{minor}: its capture API is used from {FIRST_TORCH[0]}.{FIRST_TORCH[1]} on"
    if weights.replicated:
        return "DistributedDataParallel exchanges buffers and gradients between processes"
    return ""


class NotYet(Exception):
    """XLA compiles the program of this call in the background; nothing has run. compilation: of the program."""

    def __init__(self, compilation: Compilation):
        super().__init__("XLA compiles the program")
        self.compilation = compilation


class Capture:
    """Captured graphs of a step's loss, and their programs.

    step: the CompiledStep whose weights, state and gradients the programs read and replace. refused: why Dynamo does
    not capture the loss, a NotCaptured, once that is known.
    """

    def __init__(self, step: Any, former: "Capture | None"):
        """former: the one before, of the same loss."""
        self.step = step
        self.updating, self.divisor = True, 1
        self.trained: tuple[str, ...] = ()
        reason = why_not(step)
        self.refused = step.weights.bridge.NotCaptured(reason) if reason else None
        self.short = 0  # captures before this one that served one call each
        if former is not None and former.graphs and former.loss.calls == 1:
            self.short = former.short + 1
        if self.short > MOST_SHORT:
            self.refused = step.weights.bridge.NotCaptured("each call leaves other modules or tensors", lasting=True)
        if former is not None and former.refused is not None and former.refused.lasting:
            self.refused = former.refused

    @functools.cached_property
    def results(self) -> Any:
        from torch_bridge.capture import results

        return results

    @functools.cached_property
    def loss(self) -> Any:
        from torch_bridge.capture import torch_api  # takes seconds: it imports torch's compiler
        from torch_bridge.capture.loss import CapturedLoss

        self.step.waits.line_of = torch_api.line_in

        arguments = self.step.weights.arguments
        bf16 = self.step.precision.compute == jnp.bfloat16
        return CapturedLoss(self.step.loss_fn, arguments, self._differentiable, self._program, bf16)

    def __call__(self, batch: Any, updating: bool, divisor: int, trained: tuple[str, ...]) -> Any:
        """Run a call; return the loss, or (loss, values to log). Raises NotCaptured and NotYet if nothing of it has
        run."""
        step, weights = self.step, self.step.weights
        self.updating, self.divisor, self.trained = updating, divisor, trained
        try:
            with weights.shown(), self._wait("is captured", batch, new=not self.loss.calls):
                loss, logged = self.loss(batch if weights.rows is None else weights.rows.widened(batch))
        except weights.bridge.NotCaptured as error:
            self.refused = error
            raise
        lazy = weights.lazy.LazyScalar
        step.parts = {k: v if isinstance(v, lazy) else lazy(np.asarray(v)) for k, v in logged.items()}
        return (loss, step.parts) if logged else loss

    @property
    def must_wait(self) -> bool:
        """Return True if a program is waited for, instead of computing in torch while XLA compiles it."""
        from torch_bridge.capture.meanwhile import must_wait

        step = self.step
        alone = isinstance(step.updates, OptaxUpdate) or step.weights.layout.mesh.size > 1  # torch has no counterpart
        return must_wait(step.wait or alone)

    @property
    def graphs(self) -> list[Any]:
        """Return the graphs captured so far."""
        return self.loss.graphs if "loss" in vars(self) else []

    def wait(self, new: bool, values: Sequence[Any]) -> contextlib.AbstractContextManager:
        """Return the context of a program's call; a new one is traced in it, and compiled if it is waited for."""
        return self._wait(
            "is compiled" if self.must_wait else "is traced", values, new and self.loss.calls > 1
        )  # the first call's is in its capture

    def _wait(self, what: str, values: Any, new: bool) -> contextlib.AbstractContextManager:
        if not new:
            return contextlib.nullcontext()
        leaves = [leaf for leaf in jax.tree.leaves(values) if type(leaf).__module__.partition(".")[0] in ARRAYS]
        shapes = [shape for leaf in leaves if (shape := _shape(leaf))]
        more = f" and {len(shapes) - 4} more" if len(shapes) > 4 else ""
        return self.step.waits.during(what, f"inputs of shapes {', '.join(shapes[:4]) or 'no arrays'}{more}")

    @property
    def programs(self) -> list[Any]:
        """Return the compiled programs so far."""
        programs = {id(graph.program): graph.program for graph in self.graphs}  # graphs that compute alike share one
        return [compiled for program in programs.values() for compiled in program.compiled.values()]

    def explain(self) -> list[str]:
        """Return a line for each graph of the loss that was captured, and why each after the first."""
        lines = []
        for graph in self.graphs:
            why = f": {graph.why}" if graph.why else ""
            lines.append(f"{graph.title}: {graph.count} operators, {len(graph.guards)} guards{why}")
        return lines

    def _differentiable(self, inputs: Sequence[Any]) -> list[int]:
        """Return the positions of the step's trained parameters, and of other leaves that torch gives a gradient."""
        weights, trained = self.step.weights, set(self.trained)
        wants = self.results.wants_gradient
        return [i for i, value in enumerate(inputs) if wants(value, weights.names, trained)]

    def _program(self, graph: Any) -> Callable[[Sequence[Any]], list]:
        return CapturedProgram(self, graph)


def _abstract(value: Any) -> Any:
    """Return what a program is traced with: an array's form; a Python number, which is no array, as it is."""
    return jax.ShapeDtypeStruct(value.shape, value.dtype) if hasattr(value, "dtype") else value


def _shape(leaf: Any) -> str:
    try:
        return str(tuple(leaf.shape))
    except Exception:  # a nested tensor has none
        return ""


class CapturedProgram:
    """Programs of one captured graph: one for each set of weights, sizes and options that it is called with."""

    def __init__(self, capture: Capture, graph: Any):
        jax_settings.check()
        self._capture, self._step, self._graph = capture, capture.step, graph
        self._captured = graph.captured
        aten = self._captured.program
        self._places = sorted({*aten.tensors, *self._captured.mutated, *self._captured.gradients})
        self._doubt = graph.may_raise
        self.compiled: dict[Any, _Compiled] = {}

    def _names(self, inputs: Sequence[Any]) -> tuple[str | None, ...]:
        known = self._step.weights.names
        return tuple([known.get(id(inputs[place])) for place in self._places])

    def __call__(self, inputs: Sequence[Any]) -> list:
        """Run the program on the graph's inputs; return its outputs, as Dynamo's code goes on with them. Raises
        NotCaptured where JAX has no form for an operator with these sizes, and NotYet while XLA compiles; nothing has
        run then."""
        capture, step, weights = self._capture, self._step, self._step.weights
        numbers, every = self._captured.program.numbers(inputs)
        names = self._names(inputs)
        shapes = tuple([inputs[place].shape for place in self._graph.shaped])
        options = capture.trained, step.updates.switches(), capture.updating, capture.divisor
        key = names, numbers.sizes, shapes, options
        compiled = self.compiled.get(key)
        new = compiled is None
        if compiled is None:
            step.compare_costs()
            try:
                compiled = _Compiled(self, names, numbers.sizes, every)
                compiled.check_precision(every)
            except Exception as error:
                raise weights.bridge.NotCaptured(weights.bridge.stopped_by(error)) from error
        weights.take_turn(word_of(self, key, [inputs[i] for i in compiled.foreign], numbers.free))
        values = compiled.place(inputs)
        updated = list({*compiled.moved, *step.grads} if step.grads else compiled.moved)
        limit = None if step.clip_norm is None else np.float32(step.clip_norm)
        given = (weights.arrays, step.opt_state, step.grads, values, numbers.free, step.updates.numbers(), limit)
        try:
            with weights.exchange.products(), capture.wait(new, values):
                state, (loss, outputs, norm) = compiled.run(*given, np.uint32(step.count))
        except NotYet:
            self.compiled[key] = compiled
            raise
        except Exception as error:
            if not new or isinstance(error, jax.errors.JaxRuntimeError):
                raise
            raise weights.bridge.NotCaptured(weights.bridge.stopped_by(error)) from error  # it was being traced
        loss, norm = weights.local(loss), weights.local(norm)
        self.compiled[key] = compiled
        if new and "jaxpr" in capture.results.artefacts.chosen():
            capture.results.artefacts.show("jaxpr", self._graph.title, compiled.jaxpr(*given, np.uint32(step.count)))
        weights.queue.put(loss, values)
        weights.arrays, step.opt_state, step.grads = state
        weights.move_ahead()
        if compiled.failed:
            raise weights.bridge.MayRaise(self._doubt)
        step.after_call(updated if capture.updating else None)
        step.grad_norm = None if norm is None else weights.lazy.LazyScalar(norm)
        return compiled.results(loss, outputs, inputs, every)


class _Compiled:
    """One XLA program, or one for each set of gradients that wait when it is called.

    names: of the weights among the inputs that it uses, None for others. sizes: its constants. every: the inputs of its
    first call, and the numbers that Python computes of them. foreign: positions of the inputs that are no weights.
    jitted: what XLA compiles. failed: the last result does not count, as torch may raise for these values.
    """

    def __init__(self, program: CapturedProgram, names: tuple, sizes: tuple, every: Sequence[Any]):
        capture, step = program._capture, program._step
        graph, captured = program._graph, program._captured
        self._graph, self._captured, self._step, self._sizes = graph, captured, step, sizes
        self._capture = capture
        self._results = capture.results
        self._name = dict(zip(program._places, names, strict=True))
        read = captured.program.tensors
        self.foreign = [i for i in read if self._name[i] is None]
        self._indices = graph.index_checks(self.foreign)
        self._symbols = self._results.symbols_of(captured.program.inputs, every)
        step.note_shapes(tuple((tuple(every[i].shape), every[i].dtype) for i in self.foreign))
        step.weights.widen(graph.counters(self._name))
        trained = set(capture.trained)
        self._of_step = {i: self._name[i] for i in captured.gradients if self._name[i] in trained}
        reached = set(self._of_step.values())
        self.moved = [name for name in capture.trained if name in reached]
        self._to_torch = [i for i in captured.gradients if self._name[i] is None]
        self._written = [i for i in captured.mutated if self._name[i] is None]
        if self._results.parameter_among([every[i] for i in self._to_torch]):
            raise step.weights.bridge.CannotRecord("it trains a parameter that the step's optimizer does not hold")
        if step.weights.rows is not None and (self._to_torch or self._written):
            raise step.weights.bridge.CannotRecord("it differentiates by, or writes to, a tensor outside the modules")
        if not reached:
            raise step.weights.bridge.CannotRecord("no parameter that requires a gradient reaches the loss")
        if reached & {self._name[i] for i in captured.mutated}:
            raise step.weights.bridge.CannotRecord("the loss writes to a parameter that the optimizer updates")
        self._divisor = capture.divisor
        self._constants: dict[int, Any] = {}  # outputs that are Python numbers, known once it is traced
        sums = not capture.updating
        function, self._donated = (self._accumulate, (0, 1, 2)) if sums else (self._update, (0, 1))
        self.jaxpr = jax.make_jaxpr(function)
        self._finite = OnlyFinite(function, sums) if program._doubt else None
        if self._finite is not None:
            function, self._donated = self._finite.step, (0, 1, 2)
        self.jitted = jax.jit(function, donate_argnums=self._donated)
        self._background: dict[Any, Compilation] = {}

    @property
    def failed(self) -> bool:
        return self._finite is not None and self._finite.failed

    def run(self, *arguments: Any) -> tuple:
        """Return the new state, and (loss, outputs, norm). Raises NotYet while XLA compiles."""
        program = self._program(*arguments)
        return program(*arguments) if self._finite is None else self._finite(program, *arguments)

    def _program(self, arrays, opt_state, grads, values, free, numbers, limit, count) -> Callable:
        types = *map(type, free), *(value.dtype for value in values), len(self._step.weights.counters)
        key = frozenset(grads), limit is None, types
        compilation = self._background.get(key)
        if (compilation is None or not compilation.done()) and self._capture.must_wait:
            return self.jitted
        if compilation is None:
            arguments: Any = arrays, opt_state, grads, values, free, numbers, limit, count
            portable = all(array.dtype.itemsize <= 4 for array in jax.tree.leaves((arrays, values)))  # JAX's export
            if portable:
                arguments = jax.tree.map(_abstract, arguments)
            self.jitted.trace(*arguments)
            compilation = compile_later(self.jitted, arguments, portable, self._donated)
            self._background[key] = compilation
        if not compilation.done():
            raise NotYet(compilation)
        return compilation.program

    def check_precision(self, every: Sequence[Any]) -> None:
        """Raise CannotRecord if the graph computes in float64 where float32 would miss digits, with these inputs."""
        if not self._graph.is_double:
            return
        weights, checks = self._step.weights, self._graph.precision_checks(self.foreign)
        values = [self._results.to_batch(every[i]) for i in self.foreign]
        lost = checks.loss(values, lambda: self._symbols)
        if not lost:
            state = {i: self._results.whole(weights.arrays[name]) for i, name in self._name.items() if name is not None}
            lost = checks.loss_inside(lambda: [state.get(i, value) for i, value in enumerate(every)])
        if lost:
            raise weights.bridge.CannotRecord(lost)

    def place(self, inputs: Sequence[Any]) -> list:
        """Return the inputs that are no weights, as arrays. Raises IndexOutOfBounds as torch would."""
        weights = self._step.weights
        values = [self._results.to_batch(inputs[i]) for i in self.foreign]
        self._indices.check(values, lambda: self._symbols)
        if weights.rows is None:
            return [weights.place(value) for value in values]
        here = [weights.rows.here(inputs[i]) for i in self.foreign]
        rows = [None if tensor is None else self._results.to_batch(tensor) for tensor in here]
        return [weights.place_global(*pair) for pair in zip(values, rows, strict=True)]

    def results(self, loss: Any, outputs: tuple, inputs: Sequence[Any], every: Sequence[Any]) -> list:
        """Return the graph's outputs for Dynamo's code, after what the graph has written to tensors of torch's."""
        weights, captured = self._step.weights, self._captured
        computed, grads, written = outputs
        self._results.add_gradients([inputs[i] for i in self._to_torch], grads)
        self._results.overwrite([inputs[i] for i in self._written], written)
        feed, first, kept = map(weights.local, computed), len(captured.mutated), 0
        results = []
        for place, kind in enumerate(captured.outputs):
            if isinstance(kind, tuple) and kind[0] == "constant":
                results.append(kind[1])
                continue
            value = next(feed) if place not in self._constants else self._constants[place]
            handed = captured.program.passed.get(first + kept)
            kept += 1
            if isinstance(kind, tuple):  # a number: Python's where Python knows it
                results.append(every[handed] if handed is not None else np.asarray(value).item())
            elif place in self._graph.awaited:
                results.append(weights.lazy.LazyScalar(loss if place == self._graph.loss else value))
            else:
                results.append(self._results.as_tensor(value, kind).to(weights.device))
        return results

    def _gradients(self, arrays, values: list, free: tuple, count) -> tuple:
        """Return the loss, the graph's outputs, the gradients and the changed buffers. Traced."""
        step, captured, name = self._step, self._captured, self._name
        key = jax.random.fold_in(step.key, count)
        feed = iter(values)
        used = {name[i]: arrays[name[i]] for i in captured.program.tensors if name[i] is not None}
        whole = step.weights.layout.gather(used)
        given = [next(feed) if name[i] is None else whole[name[i]] for i in captured.program.tensors]
        observed = self._results.Observed(captured.program.module, self._symbols, indices=False)
        numbers = self._results.Numbers(self._sizes, tuple(free))
        changed, outputs, grads = captured.run(given, numbers, self._results.Call(Rngs(key), observe=observed))
        if observed.conditions:
            raise step.weights.bridge.CannotRecord("it asserts a condition on values, or divides integers by a tensor")
        stored = self._results.stored
        buffers = {name[i]: stored(value, arrays[name[i]]) for i, value in changed.items() if name[i] is not None}
        buffers = {n: v if v.dtype == arrays[n].dtype else jnp.asarray(v, arrays[n].dtype) for n, v in buffers.items()}
        loss = outputs[self._graph.loss].reshape(()).astype(jnp.float32)
        kinds = captured.outputs
        kept = {i: v for i, v in enumerate(outputs) if not (isinstance(kinds[i], tuple) and kinds[i][0] == "constant")}
        self._constants = {i: value for i, value in kept.items() if not hasattr(value, "dtype")}
        left = step.weights.everywhere([value for i, value in kept.items() if i not in self._constants])
        foreign = [grads[i] for i in self._to_torch], [changed[i] for i in self._written]
        mine = step.weights.scattered({n: grads[i] for i, n in self._of_step.items()})
        return loss, (left, *foreign), mine, buffers

    def _accumulate(self, arrays, opt_state, grads, values, free, numbers, limit, count) -> tuple:
        """Add the gradients of one batch to the waiting ones. Traced."""
        loss, outputs, new, buffers = self._gradients(arrays, values, free, count)
        grads = grads | {name: grads[name] + value if name in grads else value for name, value in new.items()}
        return (arrays | buffers, opt_state, grads), (loss, outputs, None)

    def _update(self, arrays, opt_state, grads, values, free, numbers, limit, count) -> tuple:
        """Add the gradients of one batch and update the weights. Traced."""
        state, (loss, outputs, _) = self._accumulate(arrays, opt_state, grads, values, free, numbers, limit, count)
        state, norm = update(self._step, self._divisor, *state, numbers=numbers, limit=limit)
        return state, (loss, outputs, norm)
