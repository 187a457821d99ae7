"""Detect changes of a user's torch objects, other than of tensor values, that a compiled run does not follow."""

import contextlib
from collections.abc import Iterator
from typing import Any

from jaxtrain.errors import UserError

OWN_LOOP = "write the loop yourself with jaxtrain.compile, which follows such changes (docs/own_loop.md)"


class CompiledSettings:
    """Guard that refuses changes which a run won't follow: of modes, requires_grad, hooks, layers, optimizer options
    and scheduler.

    module: a torch module. loss, optimizer, scheduler: torch's; anything else is ignored.
    """

    def __init__(self, module: Any, loss: Any = None, optimizer: Any = None, scheduler: Any = None):
        from torch_bridge import setting_edits
        from torch_bridge.from_torch import unwrapped

        self._kinds = setting_edits
        roots = {"": unwrapped(module)} | ({"loss": loss} if hasattr(loss, "named_parameters") else {})
        self._edits = setting_edits.SettingEdits(roots, optimizer, scheduler)
        self._found: Any = None  # a change that the trainer has overwritten since

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Return the context of the trainer's own writes, which do not count as the user's changes."""
        self._found = self._found or next(iter(self._edits.of_optimizer()), None)
        yield
        if self._found is None:
            self._edits.note_optimizer()

    def begin(self, program: Any) -> None:
        """Begin a run. Raises UserError if something was changed since Trainer(...) or the last run that this run
        would not follow."""
        self._kinds.refuse_modes_around()
        edits, self._found = self._edits.all(), None
        for edit in edits:
            if edit.kind == self._kinds.MODE and self._edits.training_modes() == self._edits.recorded:
                continue  # the recorded step begins with train(), whatever the mode is now
            if edit.kind == self._kinds.VALUES:
                continue  # ModuleEdits handles it
            if edit.kind == self._kinds.NUMBERS and self._follows(program):
                continue
            raise UserError(
                f"the torch objects are not as Trainer(...) took them: something {edit.what}, and the compiled run "
                "does not follow; do that before Trainer(...) is made, or make a new Trainer"
            )
        self._edits.note()

    def _follows(self, program: Any) -> bool:
        """Return True if a run that begins now would use the optimizer's current numbers."""
        if int(program.state.step):
            return False
        from jaxtrain.optim.torch_rules import numbers_of, switches_of

        updates, hyper = program.given.updates, program.given.hyper(program.total_steps, program.steps_per_epoch)
        for before, now, table in zip(
            self._edits.options, updates.optimizer.param_groups, hyper["groups"], strict=True
        ):
            if switches_of(updates.rule, before) != switches_of(updates.rule, now):
                return False
            if any(
                table[name][0] != table[name].dtype.type(value) for name, value in numbers_of(updates.rule, now).items()
            ):
                return False
        return True

    def check(self, reader: str) -> None:
        """Raise UserError if the callback `reader` has changed something since the run began."""
        edit = self._found or self._edits.changed()
        if edit is not None:
            advice = f"{edit.advice}, or {OWN_LOOP}" if edit.advice else OWN_LOOP
            raise UserError(
                f"callback {reader} {edit.what}, and the compiled run goes on as it was at the start: {advice}"
            )
