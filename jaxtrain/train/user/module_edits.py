"""Follow changes that a user makes to a torch module or its optimizer before a run, or between runs."""

import contextlib
from collections.abc import Iterator
from typing import Any

from jaxtrain.errors import UserError
from torch_bridge.lazy_array import as_leaf
from torch_bridge.state_dict import place


class ModuleEdits:
    """Detection of changed tensors, so that a run starts or continues from the module's current ones.

    module: a torch module. loss: if it is a module too, its tensors are included. optimizer: a torch optimizer over
    the tensors; anything else is ignored.
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
        """Note that the run's state now equals the module's tensors. Does nothing during training."""
        if not self._training:
            self._edits = self._bridge.TensorEdits(self._tensors())
            self._edits.note()
            if self._optimizer is not None:
                self._optimizer.note()

    @contextlib.contextmanager
    def during_training(self) -> Iterator[None]:
        """Return the context of a run, in which the run itself is responsible for the tensors."""
        self._training = True
        try:
            yield
        finally:
            self._training = False
            self.note()

    def take_over(self, program: Any) -> bool:
        """Copy what has changed into the program's state; return True if anything had.

        After the first step, changed weights are taken and the run's moments stay, as in torch. Raises UserError if
        after it the optimizer's state was changed, or weights while the run averages them. Raises UserError also if
        the module holds other tensors than before (see `_replaced`).
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
        """Return the buffers that were replaced by tensors of the same shape, as by `self.mean = new`; if the step
        holds the buffer as a constant, only if its values differ. Raises UserError for any other replaced tensor."""
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
