"""XLA program for one call of a compiled step: forward, backward and update of one recorded loss."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.compiled_step.finite import OnlyFinite
from jaxtrain.compiled_step.shared_weights import Arrays
from jaxtrain.optim.optimizer import clip, global_norm
from jaxtrain.runtime import jax_settings
from jaxtrain.runtime.prng import Rngs


class StepProgram:
    """Program of one step; called with the graph's inputs, it returns the loss, or (loss, values to log).

    step: the CompiledStep whose weights, state and gradients it reads and replaces. graph: the recorded loss. leaves:
    examples of the graph's inputs. trained: parameters that may be updated. updating: update the weights with the
    gradients, divided by `divisor`; else add the gradients to the step's. With DistributedDataParallel, the processes
    exchange gradients before the update, which is then a program of its own.
    """

    def __init__(self, step: Any, graph: Any, leaves: list, trained: Sequence[str], updating: bool, divisor: int):
        jax_settings.check()
        weights, averaging = step.weights, step.averaging
        self._step, self.graph, self._updating, self._divisor = step, graph, updating, divisor
        reached = weights.reached(graph, step.record.name)
        self._moved = [key for key in trained if key in reached]  # torch skips a parameter without a gradient
        self._forwards = _exchanging_forwards(step, graph) if averaging else ()
        weights.replicas.check_parameters()
        self._unreached = averaging.unreached(self._forwards, reached) if averaging else {}
        unread = graph.unread_inputs()
        self._inputs = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and i not in unread]
        self._constants = {i: leaf for i, leaf in enumerate(leaves) if i not in self._inputs}
        self._size, self._called = len(leaves), False
        self._tables = jax.device_put(graph.tables, weights.layout.replicated)
        self._logged: list[str] = []  # names of the values to log, in the user's order
        sums = averaging is not None or not updating
        self._doubt = "" if averaging else graph.may_raise
        function, donated = (self._accumulate, (0, 1, 2)) if sums else (self._update, (0, 1))  # returns no gradients
        self._compiled = OnlyFinite(function, sums) if self._doubt else jax.jit(function, donate_argnums=donated)

    def __call__(self, leaves: list) -> Any:
        step, weights, averaging = self._step, self._step.weights, self._step.averaging
        self.graph.check_indices(leaves)  # raises if an index is out of bounds, as torch does
        inputs = [weights.place(leaves[i]) for i in self._inputs]
        if averaging:
            averaging.receive_buffers(self._forwards)
            step.grads = averaging.begin(self._forwards, self._unreached, step.grads)
        updated = list({*self._moved, *step.grads} if step.grads else self._moved)
        numbers = step.updates.numbers()
        limit = None if step.clip_norm is None else np.float32(step.clip_norm)
        arguments = step.opt_state, step.grads, (inputs, self._tables), numbers, limit, np.uint32(step.count)
        with weights.exchange.products(), self._first(inputs):
            state, (loss, parts, norm) = self._compiled(weights.arrays, *arguments)
        weights.queue.put(loss, inputs)
        weights.arrays, step.opt_state, step.grads = state
        weights.move_ahead()
        if self._doubt and self._compiled.failed:
            raise weights.bridge.MayRaise(self._doubt)
        if averaging and self._updating:
            grads = averaging.settle(step.grads)
            updated = list(grads)
            state, norm = step.update_program(self._divisor)(weights.arrays, step.opt_state, grads, numbers, limit)
            weights.arrays, step.opt_state, step.grads = state
        step.after_call(updated if self._updating else None)
        step.grad_norm = None if norm is None else weights.lazy.LazyScalar(norm)
        logged, left = parts[: len(self._logged)], parts[len(self._logged) :]
        step.parts = dict(zip(self._logged, map(weights.lazy.LazyScalar, logged), strict=True))
        if left:
            step.record.left_tensors[id(self.graph)].leave(weights.as_tensors(left))
        return (weights.lazy.LazyScalar(loss), step.parts) if logged else weights.lazy.LazyScalar(loss)

    def _first(self, inputs: Sequence) -> contextlib.AbstractContextManager:
        """Return the context of a call: the first compiles the program, which may take long."""
        if self._called:
            return contextlib.nullcontext()
        self._called = True
        shapes = ", ".join(str(tuple(value.shape)) for value in inputs[:4]) or "no arrays"
        more = f" and {len(inputs) - 4} more" if len(inputs) > 4 else ""
        return self._step.waits.during("is compiled", f"inputs of shapes {shapes}{more}")

    def _gradients(self, arrays: Arrays, values: tuple[Sequence, Arrays], key: jax.Array) -> tuple:
        """Return loss, values to log and left in Python, gradients and changed buffers. Traced.

        values: the batch's arrays, and the graph's large constants.
        """
        step, weights = self._step, self._step.weights
        inputs, tables = values
        leaves = [self._constants.get(i) for i in range(self._size)]
        for place, value in zip(self._inputs, inputs, strict=True):
            leaves[place] = value

        def loss_of(params: Arrays):
            params = weights.layout.gather(step.precision.for_compute(params))
            state = weights.state({**arrays, **params}) | tables
            loss, parts, left, changed = step.record.run(self.graph, state, leaves, Rngs(key))
            self._logged[:] = parts
            return loss.astype(jnp.float32), ([*parts.values(), *left], changed)

        params = {name: arrays[name] for name in self._moved}
        (loss, (parts, changed)), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        changed = {weights.first_name(name): value for name, value in changed.items()}
        kept = lambda value, like: value if value.dtype == like.dtype else jnp.asarray(value, like.dtype)
        return loss, parts, grads, {name: kept(value, arrays[name]) for name, value in changed.items()}

    def _accumulate(self, arrays, opt_state, grads: Arrays, values, numbers, limit, count) -> tuple:
        """Add the gradients of one batch to the waiting ones. Traced."""
        key = jax.random.fold_in(self._step.key, count)  # inside: a separate call would cost more than the rest
        loss, parts, new, buffers = self._gradients(arrays, values, key)
        new = self._step.weights.scattered(new)
        grads = grads | {name: grads[name] + value if name in grads else value for name, value in new.items()}
        return (arrays | buffers, opt_state, grads), (loss, parts, None)

    def _update(self, arrays, opt_state, grads: Arrays, values, numbers, limit, count) -> tuple:
        """Add the gradients of one batch and update the weights. Traced."""
        state, (loss, parts, _) = self._accumulate(arrays, opt_state, grads, values, numbers, limit, count)
        state, norm = update(self._step, self._divisor, *state, numbers=numbers, limit=limit)
        return state, (loss, parts, norm)


def update(step: Any, divisor: int, arrays: Arrays, opt_state: Any, grads: Arrays, numbers: Any, limit: Any) -> tuple:
    """Clip the gradients and update the parameters that have one; return the new state and the norm. Traced."""
    if divisor > 1:
        grads = {name: value / divisor for name, value in grads.items()}
    grads, norm = step.weights.scattered(grads), None
    if limit is not None:
        names = step.clipped_names()
        counted = grads if names is None else {name: value for name, value in grads.items() if name in names}
        norm = global_norm(counted)
        grads = grads | clip(counted, norm, limit)
    moved = {name: arrays[name] for name in step.updates.keys if name in grads}
    params, opt_state = step.updates.compiled(list(moved))(grads, opt_state, moved, numbers)
    return (*step.weights.constrained(arrays | params, opt_state), {}), norm


def compile_update(step: Any, divisor: int) -> Callable:
    """Compile the update alone, for gradients that the processes have averaged."""
    return jax.jit(functools.partial(update, step, divisor), donate_argnums=(0, 1))


def _exchanging_forwards(step: Any, graph: Any) -> Sequence[tuple[str, bool]]:
    """Return the calls of DistributedDataParallel modules in a loss.

    Raises CannotRecord if torch exchanges buffers between two of the calls.
    """
    weights, record = step.weights, step.record
    forwards = record.forwards[id(graph)]
    changed = {id(weights.tensors[weights.first_name(name)]) for name in graph.changed}
    twice = weights.replicas.exchanges_twice(forwards, changed)
    if twice is not None:
        raise weights.bridge.CannotRecord(
            f"{record.name} calls {twice} more than once, whose DistributedDataParallel gives its buffers out "
            "anew before each call (broadcast_buffers=False leaves them to each process)"
        )
    return forwards
