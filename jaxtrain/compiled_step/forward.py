"""Compiled forward pass in evaluation mode, with a step's newest weights."""

import logging
from collections.abc import Callable
from typing import Any

import jax

from jaxtrain.errors import UserError

log = logging.getLogger(__name__)


class CompiledForward:
    """Forward pass of the module `name`; called like the module, it returns torch tensors without gradients.

    step: a CompiledStep. A call that cannot be recorded, or that changes something in Python (it counts its calls, a
    hook collects outputs), runs in torch, and the next is tried again; if that cannot either, torch evaluates the
    module from then on, after a warning. `in_torch`: the reason.
    """

    def __init__(self, step: Any, name: str):
        self.step, self.module = step, step.weights.modules[name]
        self.prefix = "" if len(step.weights.modules) == 1 else f"{name}."
        self.generation = step.weights.generation
        self.in_torch = ""
        self._refusals = step.weights.bridge.Refusals()
        self._structure: tuple | None = None  # hooks and replaced forward methods that the record was made with
        self._record: Any = None
        self._programs: dict[tuple, Callable] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch_bridge.forward_record import ForwardRecord

        weights = self.step.weights
        weights.refresh()
        if weights.generation != self.generation:
            raise UserError("the module has other parameters or submodules than at eval(): call step.eval() again")
        structure = weights.edits.structure_of(weights.submodules)
        if structure != self._structure:
            self._structure, self._record = structure, None
            self._programs, self.in_torch = {}, ""
        if self.in_torch or weights.bridge.watched_in_torch():
            return self._torchs(args, kwargs)
        refused = None
        try:
            if self._record is None:
                self._record = ForwardRecord(self.module)
            graph, leaves = self._record.graph(args, kwargs)
            reason = self._changes()
            if not reason:
                outputs = self._run(graph, leaves)
                self._refusals.recorded()
                self._record.items.recorded()
                return outputs
        except weights.bridge.CannotRecord as error:
            if self._record is not None and self._record.items.give_up(error):
                return self(*args, **kwargs)
            refused, reason = error, weights.bridge.reason_of(error)
        return self._refuse(reason, refused, args, kwargs)

    def _changes(self) -> str:
        left = ", ".join(sorted(self._record.left)[:3])
        return left and f"it changes {left} in Python"

    def _run(self, graph: Any, leaves: list) -> Any:
        weights = self.step.weights
        graph.check_indices(leaves)
        places = tuple(i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape"))
        constants = tuple(None if i in places else leaf for i, leaf in enumerate(leaves))
        key = (id(graph), places, constants)  # the id stays valid: the record keeps its graphs
        if key not in self._programs:
            self._programs[key] = self._program(graph, places, constants)
        inputs = [weights.exchange.narrow(leaves[i]) for i in places]
        with weights.exchange.products():
            outputs = self._programs[key](weights.state(weights.arrays), graph.tables, inputs)
        tensors = weights.exchange.to_tensors(outputs, weights.exchange.device_of(self.module))
        return self._record.in_torch(graph, tensors)

    def _refuse(self, reason: str, refused: Exception | None, args: tuple, kwargs: dict) -> Any:
        """Run a call in torch, and all later ones if the one before was refused too. Raises torch's own error."""
        outputs = self._torchs(args, kwargs)
        name = type(self.module).__name__
        if self._refusals.again(refused):
            log.info("this evaluation of %s runs in torch: %s; the next is recorded anew", name, reason)
            self._structure = None
            self.step.weights.refresh()  # what the call has registered is no edit of the user's
            self.generation = self.step.weights.generation
        else:
            self.in_torch = reason
            log.warning("evaluation of %s runs in torch: %s", name, reason)
        return outputs

    def _torchs(self, args: tuple, kwargs: dict) -> Any:
        from torch_bridge import torch_step

        if self.step.ahead:
            self.step.write()
        return torch_step.in_evaluation(self.module, self.module, args, kwargs)

    def _program(self, graph: Any, places: tuple, constants: tuple) -> Callable:
        record, prefix = self._record, self.prefix

        @jax.jit
        def run(arrays: dict[str, jax.Array], tables: dict[str, jax.Array], inputs: list) -> list:
            leaves = list(constants)
            for place, value in zip(places, inputs, strict=True):
                leaves[place] = value
            own = {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}
            return record.run(graph, own | tables, leaves)

        return run
