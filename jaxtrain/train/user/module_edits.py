"""A user's torch module, and its optimizer, between `Trainer(...)` and a run, and between runs."""

import contextlib
from collections.abc import Iterator
from typing import Any

from jaxtrain.errors import UserError
from torch_bridge.lazy_array import as_leaf
from torch_bridge.state_dict import place


class ModuleEdits:
    """Have a run begin or go on from the tensors that the module holds then, not from those at construction.

    module: torch's. loss: what the module is trained by; its tensors count where it is a module. optimizer: a torch
    optimizer over them, or anything else.
    """

    def __init__(self, module: Any, loss: Any = None, optimizer: Any = None):
        from torch_bridge import torch_edits

        self._bridge = torch_edits
        self._parts = {"": module} | ({"loss.": loss} if hasattr(loss, "named_parameters") else {})
        self._optimizer = torch_edits.OptimizerEdits(optimizer) if hasattr(optimizer, "param_groups") else None
        self._training = False
        self.note()

    def _parameters(self) -> dict[str, Any]:
        return {f"{at}{name}": value for at, part in self._parts.items() for name, value in part.named_parameters()}

    def _tensors(self) -> dict[str, Any]:
        buffers = {f"{at}{name}": value for at, part in self._parts.items() for name, value in part.named_buffers()}
        return self._parameters() | buffers

    def note(self) -> None:
        """Take the present tensors for those that the run's state stands for; not while it trains."""
        if not self._training:
            self._edits = self._bridge.TensorEdits(self._tensors())
            self._edits.note()
            if self._optimizer is not None:
                self._optimizer.note()

    @contextlib.contextmanager
    def during_training(self) -> Iterator[None]:
        """Around a run, which answers for the tensors itself."""
        self._training = True
        try:
            yield
        finally:
            self._training = False
            self.note()

    def take_over(self, program: Any) -> bool:
        """Give the program's state what has changed; return True where something had.

        After steps the weights count too, beside the moments that the run has, as in torch. Raises UserError where
        the run averages its weights or the optimizer's state was changed then, or where other tensors stand in the
        module.
        """
        if self._training:
            return False
        replaced = self._replaced(program)
        changed = [name for name in self._edits.all() if name not in replaced] + replaced
        moments = self._optimizer is not None and self._optimizer.changed(values=True)
        step = int(program.state.step)
        if step and moments:
            raise UserError(
                f"the state of the torch optimizer was changed after step {step}, and the run has its own on the "
                "devices: make a new Trainer for it"
            )
        if step and changed and program.state.ema:
            raise UserError(
                f"{changed[0]} of the torch module was changed after step {step}, and the run has its weights beside "
                "the averaged ones that the module holds: trainer.load_state_dict(state_dict) replaces both"
            )
        if changed:
            self._load(program, changed)
        if moments:
            program.state = program.state.replace(opt_state=program.given.taken_over(program.state.opt_state))
        if changed or moments:
            self.note()
        return bool(changed or moments)

    def _replaced(self, program: Any) -> list[str]:
        """Buffers that other tensors of their shape stand for now, as `self.mean = new` leaves them; constants of the
        step only where their values differ. Raises UserError where another tensor than that took a place."""
        held, now = self._edits.tensors, self._tensors()
        names = [name for name in {**held, **now} if held.get(name) is not now.get(name)]
        kept = {*self._parameters(), *program.model_def.keys}
        found, refused = [], []
        for name in names:
            same = name in held and name in now and held[name].shape == now[name].shape
            if same and name in program.state.buffers:
                found.append(name)
            elif name in kept:
                refused.append(name)
            elif same and self._bridge.checksum(held[name]) != self._bridge.checksum(now[name]):
                found.append(name)
        if refused:
            raise UserError(
                f"{refused[0]} is another tensor in the torch module than when Trainer(...) was made ({len(refused)} "
                "such names): put new values into the old ones (load_state_dict without assign=True), or make the "
                "Trainer afterwards"
            )
        return found

    def _load(self, program: Any, changed: list[str]) -> None:
        weights, buffers = program.task.initial_weights(program.config), program.state.buffers
        constant = [key for key in changed if key not in weights and key not in buffers]
        if constant:
            raise UserError(
                f"{constant[0]} was changed after Trainer(...) was made, and the compiled step holds it as a constant, "
                "because forward only reads it: change it before, or register it with persistent=True"
            )
        program.load_state_dict({key: weights[key] for key in changed if key in weights}, strict=False)
        tensors = self._tensors()
        placed = {key: place(as_leaf(tensors[key]), buffers[key]) for key in changed if key not in weights}
        program.state = program.state.replace(buffers={**program.state.buffers, **placed})
