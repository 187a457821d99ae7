"""Record losses that a user writes as torch functions, with the modules that they call."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import torch
from torch.utils import _pytree as pytree

from jaxtrain.errors import UserError
from torch_bridge.datasets import NoArray, with_arrays
from torch_bridge.exchange import check_input, to_batch
from torch_bridge.from_torch import PREFIX, as_torchs, example_of
from torch_bridge.lowering import UnsupportedModel, errors  # noqa: F401
from torch_bridge.lowering.errors import (  # noqa: F401
    CannotRecord,
    MayRaise,
    NotCaptured,
    TooManyRecords,
    located,
    stays_in_torch,
    unreadable,
)
from torch_bridge.lowering.host_numbers import on_host
from torch_bridge.lowering.interpreter import Graph, graph_of
from torch_bridge.lowering.left_tensors import LeftInCall, LeftTensors
from torch_bridge.lowering.operators.printing import check_text
from torch_bridge.lowering.python import state as python_state
from torch_bridge.lowering.python.changing import ChangingNumber, forms, values_of  # noqa: F401
from torch_bridge.lowering.python.effects import Changes
from torch_bridge.lowering.python.places import Place, value_at
from torch_bridge.lowering.python.varying import Varying
from torch_bridge.lowering.recording import export as recording
from torch_bridge.lowering.recording.batch_items import BatchItems
from torch_bridge.lowering.recording.hooks import register_late  # noqa: F401
from torch_bridge.lowering.recording.objects import Contents, mapping_of, put_together, take_apart
from torch_bridge.lowering.recording.shown_types import Asked, as_numbers
from torch_bridge.lowering.recording.stand_ins import everywhere
from torch_bridge.lowering.structure import with_fields
from torch_bridge.lowering.table import Call
from torch_bridge.modes import watching
from torch_bridge.optimizers import check_scheduler  # noqa: F401
from torch_bridge.random_state import undrawn
from torch_bridge.record_constants import Constants
from torch_bridge.refusals import Refusals  # noqa: F401
from torch_bridge.replicas import Forwards, Replicas
from torch_bridge.torch_step import not_a_loss


def reason_of(error: UserError) -> str:
    """Return the first reason why something is refused, with its line in the code, as one line of text."""
    refused = error.__cause__
    if not isinstance(refused, UnsupportedModel) or not refused.obstacles:
        return str(error).partition("\n")[0]
    first = refused.obstacles[0]
    return first.what.partition("\n")[0].partition(". ")[0] + (f" at {first.where}" if first.where else "")


def fails_in_torch(error: UserError) -> bool:
    """Return True if torch cannot run the refused code either."""
    return isinstance(error.__cause__, UnsupportedModel) and error.__cause__.fails_in_torch


class Inside(threading.local):
    """Context whose `active` is True while this thread runs code inside it."""

    depth = 0

    @property
    def active(self) -> bool:
        return self.depth > 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


@contextlib.contextmanager
def _plain_mode() -> Iterator[None]:
    """Leave inference mode inside the context, for recording; leave the random generators as they are."""
    graded = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(graded), undrawn():
        yield


RECORDING = Inside()  # code runs in order to be recorded, or compared with a record
MOST_RECORDS = 8  # for different values that Python branches on
MOST_ANEW = 2  # where most calls have a function of their own: a closure made in the loop, say
_OF_BATCH = "a number of the batch"


class LossEntry(torch.nn.Module):
    """Wrap `loss_fn(*modules, batch)` as one module, so that torch.export sees the modules' parameters and buffers."""

    arguments: tuple[Any, ...]
    replicas: Replicas

    def __init__(
        self,
        modules: Mapping[str, torch.nn.Module],
        loss_fn: Callable,
        replicas: Replicas,
        looked_at: Callable[[Any], contextlib.AbstractContextManager],
    ):
        """looked_at: returns a context for the loss's call with its batch."""
        super().__init__()
        self.looked_at, self.left = looked_at, LeftInCall()
        self.wrapped_module = next(iter(modules.values())) if len(modules) == 1 else torch.nn.ModuleDict(modules)
        object.__setattr__(self, "replicas", replicas)
        object.__setattr__(self, "arguments", replicas.arguments)  # bypasses registration as submodules
        self.loss_fn = loss_fn
        self.batch_type: type | None = None  # a user's Mapping class, such as transformers' BatchEncoding
        self.varying = Varying(loss_fn, modules)
        self.dynamic: tuple[int, ...] = ()
        self.asked = Asked({})  # the Python numbers among the inputs, and what Python asks of them

    def forward(self, batch: Any, numbers: list) -> Any:
        """Call the loss. numbers: tensors that replace the Python numbers that have changed between calls."""
        replaced = self.varying.inputs.replaced(self.dynamic, numbers)
        shown = as_numbers(pytree.tree_leaves((batch, numbers)), self.asked)
        with everywhere(self.varying.inputs), replaced, shown, self.replicas.local():
            given = put_together(batch)
            if self.batch_type is not None and not isinstance(given, self.batch_type):
                given = mapping_of(self.batch_type, given)
            self.left.look(self, self.varying.inputs)
            with self.looked_at(given):
                outputs = with_fields(located(self.loss_fn)(*self.arguments, given))
            for name in outputs[1] if _with_parts(outputs) else ():
                check_text(name)
            return self.left.take(outputs)


class LossRecord:
    """Graphs of one loss: one per modes of the modules, structure and dtypes of the batch and, with fixed sizes, shape.

    The modules are recorded in their present modes: a BatchNorm in eval() inside a module in train() stays so.
    """

    def __init__(
        self,
        modules: Mapping[str, torch.nn.Module],
        loss_fn: Callable,
        replicas: Replicas | None = None,
    ):
        """replicas: objects to pass to the loss function, if not the modules themselves."""
        self.replicas = replicas or Replicas(modules)
        self.entry = LossEntry(modules, loss_fn, self.replicas, self._look_at)
        self.left_tensors: dict[int, LeftTensors] = {}  # by the graph's id
        self.forwards: dict[int, Forwards] = {}  # forward passes of DDP wrappers, by the graph's id
        self.name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        self._graphs: dict[Any, list[_Recorded]] = {}
        self._recorded: dict[Any, list[_Recorded]] = {}
        self._proven: set[str] = set()  # Python numbers that a record has taken as inputs
        self._constants = Constants()
        self._read: dict[str, str] = {}
        self._changed: set[str] = set()
        self.left: set[str] = set()  # Python attributes that a torch call changes and a compiled one does not
        self._changes_batch = False
        self._calls = 0
        self._settings: list[tuple[Place, Any]] = []  # that the last call recorded has made
        self._settled = False  # whether settings of a first call were looked at

    @contextlib.contextmanager
    def _look_at(self, batch: Any) -> Iterator[None]:
        contents = Contents(batch)
        yield
        self._changes_batch = contents.written()  # it may remove items, which nothing reads afterwards

    def python(self) -> tuple[tuple, list[ChangingNumber]]:
        """Return a key for the present Python values that the loss reads, and those of them that are inputs."""
        return self.entry.varying.state()

    def check_captured(self, ended: bool = False) -> None:
        """Raise CannotRecord if a constant of the record has changed since the last call, LateEdit if calls may have
        used the old value. ended: no call follows."""
        self._calls += 1
        self._constants.check(self.name, ended)

    def graph(
        self, leaves: Sequence[Any], spec: Any, modes: Any, batch_type: type | None
    ) -> tuple[Graph, list[ChangingNumber]]:
        """Return the graph for a batch of these leaves and structure, these modes and the present Python numbers, and
        the list of those numbers that it takes as inputs after the leaves. Record it if there is none yet.

        Raises CannotRecord listing everything that cannot be recorded.
        """
        self.entry.batch_type = batch_type
        form = modes, batch_type, tuple(getattr(leaf, "dtype", None) for leaf in leaves)
        while True:
            (dynamic, constant), numbers = self.entry.varying.state()
            known = self._graphs.setdefault((form, dynamic, constant), [])
            for recorded in known:
                if recorded.holds([*leaves, *numbers], spec):
                    return recorded.graph, numbers
            varying = self.entry.varying
            every = tuple(varying.dynamic)
            try:
                recorded = self._record(leaves, spec, every, varying.changing(every))
            except UnsupportedModel as error:
                new = [number for number in every if varying.names([number])[0] not in self._proven]
                if not new:
                    raise CannotRecord(f"{self.name}: {error}") from error
                varying.branch_on([n for n in new if not self._records_with(n, leaves, spec)] or new)
                continue
            if self._settings and not (every or self._settled) and self._settle(form, recorded, leaves, spec):
                continue
            unread, asked = recorded.graph.host.unread(), recorded.graph.host.asked()
            idle = {number for place, number in enumerate(every, len(leaves)) if place in unread}
            self._proven.update(varying.names([n for p, n in enumerate(every, len(leaves)) if p not in unread | asked]))
            (dynamic, constant), numbers = varying.leave_out(idle)
            if len(dynamic) != len(every):
                recorded = self._record(leaves, spec, dynamic, numbers)
            known = self._graphs.setdefault((form, dynamic, constant), [])
            recorded = self._same_as_before(recorded, (form, *varying.names(dynamic)), [*leaves, *numbers])
            self._check_ways([*known, recorded], [_OF_BATCH] * len(leaves) + varying.names(dynamic))
            known.append(recorded)

    def _check_ways(self, known: Sequence["_Recorded"], names: Sequence[str]) -> None:
        """Raise TooManyRecords if the last record is one for too many ways through the code. names: of its inputs."""
        asked = known[-1].graph.host.asked()
        ways = len({other.graph.host.conditions for other in known}) if asked else 0
        from_batch = all(names[place] == _OF_BATCH for place in asked)
        if ways > MOST_RECORDS and not (from_batch and 2 * ways <= self._calls):
            read = ", ".join(sorted({names[place] for place in asked})[:3])
            raise TooManyRecords(
                f"{self.name}: Python branches on {read}, whose values have asked for {MOST_RECORDS} programs already: "
                "compute with the number itself, or with torch.where"
            )

    def _settle(self, form: tuple, recorded: "_Recorded", leaves: Sequence[Any], spec: Any) -> bool:
        """Leave the settings of a first call as it sets them (`config.problem_type = "regression"`), if a second call
        changes nothing more and computes the same; return whether it does. This is tried once."""
        settings, self._settled = self._settings, True
        left, self.left = self.left, set()
        before = [value_at(place) for place, _ in settings]
        for place, value in settings:
            place.container[place.key] = value
        with contextlib.suppress(CannotRecord, UnsupportedModel):
            (dynamic, constant), _ = self.entry.varying.state()
            again = self._record(leaves, spec, (), [])
            if not self.left and not dynamic and python_state.difference(recorded.program, again.program) is None:
                self._graphs.setdefault((form, dynamic, constant), []).append(again)
                return True
        self.left |= left
        for (place, _), value in zip(settings, before, strict=True):
            place.container[place.key] = value
        return False

    @_plain_mode()
    def _record(self, leaves, spec, dynamic: tuple, numbers: list) -> "_Recorded":
        self.entry.dynamic, self.entry.asked = dynamic, Asked(values_of([*leaves, *numbers]))
        batch = pytree.tree_unflatten([example_of(leaf) for leaf in leaves], spec)
        captured: dict[int, torch.Tensor] = {}
        examples = (*batch, [example_of(number) for number in numbers])
        checks: list[str] = []
        left = Changes()
        with self.entry.varying.inputs.effects() as changed, RECORDING:
            program = recording.export(self.entry, examples, captured, self._read, left, checks=checks)
        if self._changes_batch:
            raise CannotRecord(f"{self.name} changes a list, dict or object that it is given")
        self.left |= left | changed
        self._settings = left.settings + changed.settings
        graph = on_host(graph_of(program, PREFIX, checks=checks), [*leaves, *numbers], self.entry.asked.conditions)
        self.forwards[id(graph)] = self.replicas.forwards
        self.left_tensors[id(graph)] = self.entry.left.found
        for name in self.entry.left.found.read(captured):
            raise CannotRecord(f"{self.name} reads {name}, which the call before has set")
        recording.check_read(self.entry, self._read, {*graph.changed, *self._changed})
        self._changed |= graph.changed
        self._constants.keep(captured, self.entry.varying.inputs)
        return _Recorded(graph, spec, program)

    def _records_with(self, number: int, leaves, spec) -> bool:
        """Return False if Python itself needs this number: it branches on it, or counts with it."""
        varying = self.entry.varying
        numbers = [n for n in varying.dynamic if n == number or varying.inputs.places[n].name in self._proven]
        try:
            self._record(leaves, spec, tuple(numbers), varying.changing(numbers))
        except UnsupportedModel:
            return False
        return True

    def _same_as_before(self, recorded: "_Recorded", key: tuple, inputs: list) -> "_Recorded":
        """Return an earlier record for other Python values that computes the same, to save a compilation; else
        `recorded`.

        Raises CannotRecord if too many records differ.
        """
        others = self._recorded.setdefault(key, [])
        of_structure = [other for other in others if other.holds(inputs, recorded.structure)]
        for other in of_structure:
            same_form = other.program.call_spec.out_spec == recorded.program.call_spec.out_spec  # has the logged names
            if same_form and python_state.difference(other.program, recorded.program) is None:
                return other
        most = MOST_ANEW if 2 * self.entry.varying.anew > self._calls else MOST_RECORDS
        if len(of_structure) >= most:
            raise TooManyRecords(
                f"{self.name}: {self.entry.varying.described()}, which has asked for {most} programs already: "
                "make objects once, and compute with torch.where on a tensor of the batch"
            )
        others.append(recorded)
        return recorded

    def run(self, graph: Graph, state: Mapping[str, jax.Array], leaves: Sequence[Any], rngs: Callable) -> tuple:
        """Return the loss, the values to log, the tensors that the call leaves in Python, and the buffers that it
        changes, by name. Runs under JAX tracing.

        Raises UserError if the function returns neither a scalar nor (scalar, dict of values).
        """
        outputs, changed = graph.run({name: as_torchs(value) for name, value in state.items()}, leaves, Call(rngs))
        outputs, left = outputs if self.left_tensors[id(graph)] else (outputs, [])
        loss, parts = outputs, {}
        if _with_parts(outputs):
            loss, parts = outputs
        if not hasattr(loss, "shape") or loss.size != 1:  # backward() accepts one number of any shape
            raise not_a_loss(self.name, loss if _with_parts(outputs) else outputs)
        return loss.reshape(()), dict(parts), left, changed


def _with_parts(outputs: Any) -> bool:
    """Return True if a loss function has returned values to log besides the loss."""
    return isinstance(outputs, (tuple, list)) and len(outputs) == 2 and isinstance(outputs[1], Mapping)


@dataclasses.dataclass(frozen=True)
class _Recorded:
    """A record: its graph, the structure of its batch, and the exported program."""

    graph: Graph
    structure: Any
    program: torch.export.ExportedProgram

    def holds(self, inputs: Sequence[Any], structure: Any) -> bool:
        return self.structure == structure and self.graph.refusal(inputs) is None


def flatten(batch: Any, items: BatchItems) -> tuple[list[Any], Any, type | None]:
    """Return a batch's leaves as arrays, its structure, and its class if that is a user's Mapping. Raises
    CannotRecord. items: follow its Python numbers and texts from call to call."""
    own: type | None = type(batch) if isinstance(batch, Mapping) and type(batch) is not dict else None
    return *pytree.tree_flatten((items.follow(as_inputs(batch)),)), own


def as_inputs(value: Any) -> Any:
    """Return a nested value with its tensors as arrays and its objects taken apart. Raises CannotRecord for what is no
    array, for unhashable objects, which cannot be part of a cache key, and for what raises when it is looked at."""
    try:
        inputs = take_apart(with_arrays(value, to_batch))
        inputs = pytree.tree_map(lambda leaf: with_arrays(leaf, to_batch), inputs)  # tensors inside objects
        for leaf in pytree.tree_leaves(inputs):
            check_input(leaf)
    except NoArray as error:
        raise CannotRecord(str(error)) from error
    except UserError:
        raise
    except Exception as error:
        raise unreadable("the batch", None, error) from error
    return inputs


def check_gradients_on(loss: str) -> None:
    """Raise UserError if gradients are off, so that torch's backward() would find no graph."""
    if not torch.is_grad_enabled():
        raise UserError(
            f"{loss}: a step was called under torch.no_grad(), set_grad_enabled(False) or inference_mode(), where "
            "torch's backward() raises. Call it outside to train; step.eval() gives the forward pass of a validation"
        )


def watched_in_torch() -> str:
    """Return why a step has to run in torch now: something looks into torch's own passes; "" if nothing does."""
    if torch.is_anomaly_enabled():
        return "torch's anomaly mode looks into torch's own backward pass"
    return (modes := watching()) and f"{modes} around the step sees each of torch's own operations"


def flags_of(modules: Sequence[torch.nn.Module]) -> tuple:
    """Return train/eval of every submodule, and torch's own modes: whether gradients are on, and autocast's dtypes."""
    casts = ((kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))
    return (*(module.training for module in modules), torch.is_grad_enabled(), *casts)


def seed_of(seed: int | None) -> int:
    """Return the given seed, or torch's own."""
    return torch.initial_seed() if seed is None else seed
