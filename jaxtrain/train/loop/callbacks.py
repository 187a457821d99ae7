"""Call the user's own callback objects during a run."""

import difflib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxtrain.errors import UserError, shortened
from jaxtrain.train.user.module_reads import ModuleReads

HOOKS = {
    "on_train_start": "(trainer)",
    "on_step_end": "(trainer, step, metrics)",
    "on_epoch_end": "(trainer, epoch)",
    "on_evaluation_end": "(trainer, step, metrics)",
    "on_checkpoint": "(trainer, step, path)",
    "on_exception": "(trainer, error)",
    "on_train_end": "(trainer)",
}


BETWEEN_EPOCHS = ("on_epoch_end", "on_evaluation_end", "on_checkpoint")
WHILE_TRAINING = ("on_train_start", "on_step_end", "on_epoch_end", "on_evaluation_end", "on_checkpoint")


class Every:
    """Callback that calls a function every so many steps.

    Args:
        steps: between two calls.
        function: (trainer, step, metrics) -> None; reading a metric waits for the step.

    Examples:
        >>> from jaxtrain.train.loop.callbacks import Every
        >>> show = Every(100, lambda trainer, step, metrics: print(step, metrics["loss"]))
        >>> show.on_step_end(None, 200, {"loss": 0.5})
        200 0.5
    """

    def __init__(self, steps: int, function: Callable[[Any, int, Mapping[str, float]], None]):
        if steps < 1:
            raise UserError(f"Every({steps}, ...): wanted at least 1 step")
        self.steps, self.function = steps, function

    def on_step_end(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        if step % self.steps == 0:
            self.function(trainer, step, metrics)


class StepMetrics(Mapping):
    """One step's metrics by name. They stay on the device until one is read; reading waits for the step."""

    def __init__(self, values: jax.Array, names: Sequence[str], row: int, count: int):
        self._values, self._names, self._row, self._count = values, tuple(names), row, count

    def __getitem__(self, name: str) -> float:
        place = self._names.index(name) if name in self._names else None
        if place is None:
            raise KeyError(f"{name}: this step has {', '.join(self._names)}")
        return float(np.asarray(self._values).reshape(self._count, -1)[self._row, place])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Control:
    """Requests of callbacks to the run, made through `trainer.run` and served after the current step.

    With several processes, all must make the same requests.
    """

    def __init__(self) -> None:
        self.wants_stop = self.wants_evaluation = self.wants_checkpoint = False
        self.logged: dict[str, float] = {}

    def stop(self) -> None:
        """End the run: its state is saved and `on_train_end` is called."""
        self.wants_stop = True

    def evaluate(self) -> None:
        """Evaluate the validation split; it counts for the best checkpoint and for early stopping."""
        self.wants_evaluation = True

    def save(self) -> None:
        """Save a checkpoint."""
        self.wants_checkpoint = True

    def log(self, values: Mapping[str, float]) -> None:
        """Send numbers to metrics.jsonl and the trackers, at the present step."""
        for name, value in values.items():
            try:
                self.logged[name] = float(value)
            except (TypeError, ValueError):
                raise UserError(f"trainer.run.log: {name} is {shortened(value)}, wanted a number") from None

    def take(self, name: str) -> Any:
        """Return a request and clear it."""
        value = getattr(self, name)
        setattr(self, name, type(value)())
        return value


class Callbacks:
    """The callbacks of a run. Raises UserError for an object without a hook, or with a hook of unknown name.

    reads: lets callbacks read the torch module that is trained.
    """

    def __init__(self, callbacks: Sequence[Any] = (), trainer: Any = None, reads: ModuleReads | None = None):
        if not isinstance(callbacks, Iterable):
            raise UserError(f"callbacks: {type(callbacks).__name__} is one object; give a list, callbacks=[...]")
        self.callbacks, self.trainer, self.reads = list(callbacks), trainer, reads
        for callback in self.callbacks:
            _check(callback)
        self.raised: Exception | None = None  # the last exception that a callback raised
        self._by_hook = {hook: [c for c in self.callbacks if callable(getattr(c, hook, None))] for hook in HOOKS}

    def has(self, hook: str) -> bool:
        return bool(self._by_hook[hook])

    @property
    def between_epochs(self) -> bool:
        """Return True if a callback runs between two epochs, when it may change the data."""
        return any(map(self.has, BETWEEN_EPOCHS))

    def call(self, hook: str, *arguments: Any) -> None:
        """Call every callback that has this hook, in order.

        An exception from a callback is raised unchanged, because the caller of train() may expect it
        (optuna.TrialPruned), with a note that names the callback. Raises UserError if a callback changed a Python value
        that the step was recorded with, or a tensor that it may only read.
        """
        for callback in self._by_hook[hook]:
            name = f"{type(callback).__name__}.{hook}"
            try:
                if self.reads is not None:
                    self.reads.hold()
                getattr(callback, hook)(self.trainer, *arguments)
            except Exception as error:
                if not isinstance(error, UserError):
                    of = {"on_epoch_end": "epoch"}.get(hook, "step")
                    at = f" at {of} {arguments[0]}" if arguments and isinstance(arguments[0], int) else ""
                    error.add_note(f"raised by callback {name}{at}")
                self.raised = error
                raise
            if hook in WHILE_TRAINING:
                self._check_recorded(name)
                if self.reads is not None:
                    self.reads.check(name)

    def _check_recorded(self, name: str) -> None:
        twin = self.trainer.program.task.twin if hasattr(self.trainer, "program") else None
        stale = [] if twin is None else twin.stale(self.trainer.program.config)
        if stale:
            raise UserError(
                f"callback {name} changed {', '.join(stale)}, and the compiled step keeps the value of the start: use "
                "a buffer that forward updates (self.register_buffer), or your own loop with jaxtrain.compile, "
                "which follows such values (docs/own_loop.md)"
            )

    def state_dict(self) -> list[list]:
        """Return [class name, state] of every callback that has a state. Raises UserError if one does not fit JSON."""
        states = []
        for callback in self.callbacks:
            if callable(getattr(callback, "state_dict", None)):
                state = callback.state_dict()
                try:
                    json.dumps(state)
                except (TypeError, ValueError) as error:
                    raise UserError(
                        f"callback {type(callback).__name__}.state_dict(): {error}; return numbers, strings, lists and "
                        "dicts, which a checkpoint's JSON holds"
                    ) from error
                states.append([type(callback).__name__, state])
        return states

    def load_state_dict(self, states: Sequence[Sequence]) -> None:
        """Restore every callback's state; states are matched by class name, in order."""
        waiting = list(states)
        for callback in self.callbacks:
            found = next((entry for entry in waiting if entry[0] == type(callback).__name__), None)
            if found is not None and callable(getattr(callback, "load_state_dict", None)):
                waiting.remove(found)
                callback.load_state_dict(found[1])
                if self.reads is not None:
                    self.reads.check(f"{type(callback).__name__}.load_state_dict")


def _check(callback: Any) -> None:
    name = type(callback).__name__
    if isinstance(callback, type):
        raise UserError(f"callbacks: {callback.__name__} is a class; give an object, {callback.__name__}()")
    hooks = [attribute for attribute in dir(callback) if attribute.startswith("on_")]
    unknown = [hook for hook in hooks if hook not in HOOKS]
    if unknown:
        near = difflib.get_close_matches(unknown[0], HOOKS, 1)
        hint = f", did you mean {near[0]}{HOOKS[near[0]]}?" if near else ""
        raise UserError(f"callbacks: {name}.{unknown[0]}: no such hook{hint} There are {', '.join(HOOKS)}")
    if not hooks:
        raise UserError(f"callbacks: {name} has no hook; there are {', '.join(HOOKS)}")
    for name_of_hook in hooks:
        function = getattr(callback, name_of_hook)
        if callable(function):
            _check_signature(f"{name}.{name_of_hook}", function, HOOKS[name_of_hook])


def _check_signature(name: str, hook: Any, wanted: str) -> None:
    """Raise UserError now for a hook whose call would fail, or do nothing, perhaps only after hours."""
    if inspect.iscoroutinefunction(hook) or inspect.isgeneratorfunction(hook):
        raise UserError(f"callbacks: {name} is async or yields, so that a call does nothing; wanted def {name}{wanted}")
    try:
        inspect.signature(hook).bind(*wanted.split(","))
    except ValueError:  # a built-in has no known signature
        return
    except TypeError as error:
        raise UserError(f"callbacks: {name}{inspect.signature(hook)}: {error}; wanted {wanted}") from None
