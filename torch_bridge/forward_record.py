"""Record a module's forward pass in evaluation mode."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import torch

from torch_bridge.from_torch import Forward, Record, bind
from torch_bridge.lowering import UnsupportedModel
from torch_bridge.lowering.errors import CannotRecord
from torch_bridge.lowering.interpreter import Graph
from torch_bridge.lowering.left_tensors import LeftInCall, LeftTensors
from torch_bridge.lowering.python.inputs import PythonInputs
from torch_bridge.lowering.recording.batch_items import BatchItems
from torch_bridge.lowering.recording.stand_ins import everywhere
from torch_bridge.lowering.structure import WithLeft
from torch_bridge.lowering.table import Call
from torch_bridge.record_constants import Constants
from torch_bridge.step_record import as_inputs


class _LeavingForward(Forward):
    """A module's call whose results include the tensors that it leaves in Python."""

    def __init__(self, module: torch.nn.Module, inputs: PythonInputs):
        super().__init__(module)
        self.inputs, self.left = inputs, LeftInCall()
        self.others: set[str] = set()  # classes of outputs that are no tensors or numbers

    def forward(self, args: tuple, kwargs: dict):
        with everywhere(self.inputs):
            self.left.look(self, self.inputs)
            return self.left.take(super().forward(args, kwargs))

    def other_output(self, leaf: Any) -> None:
        """Note an object that the caller may use: a distribution, say."""
        if leaf is not None:
            self.others.add(type(leaf).__name__)


class ForwardRecord:
    """Recorded forward pass of a module in evaluation mode."""

    def __init__(self, module: torch.nn.Module):
        self.module = module
        self.inputs = PythonInputs(module.forward, {"": module})
        self._values = self.inputs.values()
        self.items = BatchItems(type(module).__name__)
        self._record_anew()

    def _record_anew(self) -> None:
        self.entry = _LeavingForward(self.module, self.inputs)
        self.record = Record(self.entry, effects=self.inputs.effects)
        self.left_tensors: dict[int, LeftTensors] = {}  # by the graph's id
        self._constants, self._kept = Constants(), 0

    def graph(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Graph, list[Any]]:
        """Return the graph for these arguments, and their leaves as arrays. Raises CannotRecord if it cannot be
        recorded, LateEdit if earlier calls may have used old values of a constant."""
        inputs = bind(self.module, *self.items.follow(as_inputs((args, dict(kwargs)))))
        if self.inputs.moved():
            self.inputs.look()
            self._values = []
        values = self.inputs.values()
        if values != self._values:  # a record holds Python values as constants
            self._values = values
            self._record_anew()
        try:
            self._constants.check(type(self.module).__name__)
        except CannotRecord:
            self._record_anew()
        if not self.record.holds(inputs, training=False):
            self.items.check()
        try:
            graph, leaves = self.record.graph(inputs, training=False)
        except UnsupportedModel as error:
            raise CannotRecord(str(error)) from error
        if self.entry.others:
            raise CannotRecord(f"it returns a {min(self.entry.others)}, which is no tensor or number")
        self.items.check_ways({graph.host.conditions for graph in self.record.graphs() if graph.host.conditions})
        if len(self.record.captured) > self._kept:
            self._kept = len(self.record.captured)
            self._constants.keep(self.record.captured, self.inputs)
        if graph.spec.type is WithLeft and id(graph) not in self.left_tensors:  # just recorded
            self.left_tensors[id(graph)] = self.entry.left.found
            self.record.left.update(self.entry.left.found.read(self.record.captured))
        return graph, graph.host.given(leaves)

    def in_torch(self, graph: Graph, tensors: Sequence[Any]) -> Any:
        """Return the outputs of a call, and leave its tensors in Python. tensors: the results of `run`."""
        outputs = graph.in_torch(tensors)
        if not isinstance(outputs, WithLeft):
            return outputs
        self.left_tensors[id(graph)].leave(outputs.tensors)
        return outputs.outputs

    @property
    def left(self) -> set[str]:
        """Return the Python attributes that a torch call changes and a compiled one does not."""
        return self.record.left

    def run(self, graph: Graph, state: Mapping[str, jax.Array], leaves: Sequence[Any]) -> list[Any]:
        """Return the leaves of the module's outputs, for `in_torch`. Runs under JAX tracing."""
        return graph.run_leaves({name: state[name] for name in (*graph.state, *graph.tables)}, leaves, Call(None))[0]
