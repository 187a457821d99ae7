"""A torch module, its loss and an example batch, prepared for training in JAX."""

import copy
import dataclasses
import itertools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import _pytree as pytree

from jaxtrain.config import LoraConfig
from jaxtrain.errors import UserError, one_line
from torch_bridge.datasets import to_numpy, to_torch
from torch_bridge.double_values import tell_changed
from torch_bridge.from_torch import ConvertedModule, state_of, unwrapped
from torch_bridge.lowering import UnsupportedModel
from torch_bridge.lowering.errors import ADVICE_FAULT, Obstacle, OperatorFailed, exception_line
from torch_bridge.lowering.index_checks import IndexOutOfBounds
from torch_bridge.lowering.python.inputs import PythonInputs
from torch_bridge.lowering.python.places import value_at
from torch_bridge.lowering.ready import check_ready
from torch_bridge.records import Forward, Record
from torch_bridge.torch_edits import CapturedTensors
from torch_bridge.training import lora
from torch_bridge.training.batch_plan import Plan
from torch_bridge.training.loss_entry import LossEntry, in_criterion, main_output, with_loss

log = logging.getLogger(__name__)


class TorchTask:
    """The module, its recorded forward pass and its recorded loss.

    loss: a torch loss module, a torch function of (output, batch) or (output, target), or None for the model's own.
    example_batch: the dataset's entries of one collated batch in numpy; its batch size does not matter. inputs: batch
    entries that the module takes, in order; matched by name by default. target: the entry that a loss compares with.
    adapters: LoRA config to add to the module, in place, and the seed of the adapters' weights.
    Raises UserError listing everything that cannot be converted, with the lines of the module.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        loss: Callable | None,
        example_batch: Mapping[str, Any],
        inputs: list[str] | None = None,
        target: str | None = None,
        adapters: tuple[LoraConfig, int] | None = None,
    ):
        module = unwrapped(module)
        check_ready(module)
        if adapters is not None:
            lora.adapt(module, *adapters)
        self.module = module
        example = dict(example_batch)
        pair = Plan.of_pair(module, example) if inputs is None and loss is not None else None
        self.plan = pair or Plan.of(module, list(example), inputs, target, own_loss=loss is None)
        self.entries = tuple(example)
        self.criterion = loss
        self._python = PythonInputs(loss or module.forward, {"": module})
        self.forward_record = Record(Forward(module))
        self._values = self._python.named()
        self._moved: list[str] = []  # names of objects replaced since then
        self.loss_record = self._loss_record()
        self._unread: set[int] = set()
        shape = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        self.shapes = {key: jax.tree.map(shape, value) for key, value in example.items()}
        self.trained = {name: p.requires_grad for name, p in module.named_parameters(remove_duplicate=False)}
        self._record_first(example, fixed=inputs is not None)
        self.record(example, training=True)
        self._hold_constants()
        if self.loss_record.left:
            changed = ", ".join(sorted(self.loss_record.left)[:3])
            log.warning("%s changes %s in Python, which a compiled run does not", type(module).__name__, changed)
        tell_changed(type(module).__name__, dict(module.named_buffers()), self.loss_record.changed())
        if adapters is not None:
            lora.check_used(module, self.loss_record.graphs())
        self.trained_loss = self._trained_loss()
        if self.trained_loss is not None:
            self.trained |= {f"loss.{name}": p.requires_grad for name, p in loss.named_parameters()}

    def _loss_record(self) -> Record:
        return Record(
            LossEntry(self.module, self.criterion, self.plan),
            {"criterion.": "loss."},
            self._python.effects,
        )

    def _record_first(self, example: Mapping[str, Any], fixed: bool) -> None:
        """Record in evaluation mode, with the first call form that torch accepts. fixed: the user gave the module's
        arguments."""
        plans = [self.plan]
        if self.plan.spread:
            plans.append(dataclasses.replace(self.plan, spread=False))  # forward(self, pair)
        if not fixed:
            plans += [plan for plan in [Plan.whole_batch(self.module, list(example), self.plan)] if plan is not None]
        forms = [with_loss(plan, self.criterion, list(example)) for plan in plans]
        plans = [plan for form in itertools.zip_longest(*forms) for plan in form if plan is not None]
        refusals = []
        for self.plan in plans:
            self.loss_record = self._loss_record()
            try:
                self.loss_record.graph((example,), False)
                return
            except UnsupportedModel as error:
                if not error.fails_in_torch:
                    raise UserError(str(error)) from error
                refusals.append(error)
        called = plans[0].shown(self.module)
        raise _wrong_call(refusals[0], called, self.criterion) from refusals[0]

    def record(self, batch: Mapping[str, Any], training: bool) -> None:
        """Record the loss of this batch unless an existing record is valid for its sizes. Raises UserError as the
        class."""
        entries = {key: batch[key] for key in self.entries}
        try:
            self.loss_record.graph((entries,), training)
        except UnsupportedModel as error:
            raise UserError(str(error)) from error

    def record_outputs(self) -> None:
        """Record the module's outputs in evaluation mode, which otherwise happens where they are first computed."""
        zeros = {key: jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes) for key, shapes in self.shapes.items()}
        jax.eval_shape(lambda: jax.tree.leaves(self.outputs(self.build(), zeros)))

    def fits(self, batch: Mapping[str, Any]) -> bool:
        """Return True if the training loss can be computed for arrays of these shapes; capture it if need be."""
        try:
            self.record(batch, training=True)
        except UserError:
            return False
        return True

    def check(self, batch: Mapping[str, Any], pieces: int) -> None:
        """Raise IndexOutOfBounds for a host batch with classes, ids or positions that torch would refuse. pieces:
        number of micro-batches that it is cut into."""
        entries = {key: batch[key] for key in self.entries}
        if self.loss_record.check_indices((entries,), training=True) or pieces == 1:
            return
        rows = len(jax.tree.leaves(entries)[0]) // pieces
        for i in range(pieces):
            piece = jax.tree.map(lambda value, first=i * rows: value[first : first + rows], entries)
            try:
                self.loss_record.check_indices((piece,), training=True)
            except IndexOutOfBounds as error:
                raise IndexOutOfBounds(str(error), None if error.row is None else error.row + i * rows) from None

    def lost_digits(self, batch: Mapping[str, Any]) -> str:
        """Describe where the loss uses float64 inputs of this batch whose results in float32 would differ from torch's;
        "" if nowhere."""
        entries = {key: batch[key] for key in self.entries}
        graph, leaves = self._loss_record().graph((entries,), training=True)
        return graph.lost_digits(leaves)

    def lost_inside(self, batch: Mapping[str, Any]) -> str:
        """Describe where the loss computes float64 values from its weights whose results in float32 would differ from
        torch's; "" if nowhere."""
        entries = {key: batch[key] for key in self.entries}
        graph, leaves = self.loss_record.graph((entries,), training=False)
        tensors = dict(self.loss_record.entry.wrapped_module.state_dict(keep_vars=True))
        return graph.lost_inside(leaves, tensors) if set(graph.state) <= tensors.keys() else ""

    def stale(self) -> list[str]:
        """Return the names of Python values and constants of module and loss that differ from those recorded."""
        constants = self._changed_constants()
        if moved := self._python.moved():
            self._moved += moved
            self._python.look()
        values = self._python.named()
        if values == self._values and not constants and not self._moved:
            return []
        try:
            now = [self._loss_record().graph((self.shapes,), training)[0] for training in (False, True)]
            if all(graph.computes_as(self.loss_record.graph((self.shapes,), i == 1)[0]) for i, graph in enumerate(now)):
                self._values, self._moved = values, []  # the changed values are not read
                self._unread.update(constants)
                self._hold_constants()
                return []
        except UnsupportedModel:
            pass
        names = {**self._values, **values}
        changed = [name for name in names if self._values.get(name) != values.get(name)]
        return [*changed, *self._moved, *constants.values()]

    def _hold_constants(self) -> None:
        """Track the outside tensors and arrays that the records may hold, and the places that hold them."""
        self._places = [(place, value_at(place)) for place in self._python.held]
        tensors = {str(number): tensor for number, tensor in self.loss_record.captured.items()}
        for _, value in self._places:
            if isinstance(value, np.ndarray) and value.flags.writeable and value.dtype.kind in "biuf":
                tensors[str(id(value))] = torch.from_numpy(value)
        self._constants = CapturedTensors()
        self._constants.add({key: tensor for key, tensor in tensors.items() if int(key) not in self._unread})

    def _changed_constants(self) -> dict[int, str]:
        """Return the ids of tracked constants that have changed, with their names in the code."""
        names = {id(value): place.name for place, value in self._places}
        changed = {int(key) for key in self._constants.changed()}
        changed |= {id(value) for place, value in self._places if value_at(place) is not value} - self._unread
        return {number: names.get(number, "a tensor that the loss uses") for number in changed}

    def build(self) -> ConvertedModule:
        """Return the flax module with zeros for parameters, which `weights` fills; buffers outside the state dict are
        set."""
        model = ConvertedModule(self.forward_record, self.module, self.loss_record, empty=True, loss=self.trained_loss)
        model.definition = self
        return model

    def weights(self) -> dict[str, np.ndarray]:
        """Return the torch module's state dict, and the trained part of the loss's."""
        return state_of(self.module) | {key: to_numpy(value) for key, value in self._loss_state().items()}

    def _trained_loss(self) -> torch.nn.Module | None:
        """Return the loss module if it has parameters or buffers that change. Raises UserError if the module already
        has an attribute `loss`."""
        loss = self.criterion
        if not isinstance(loss, torch.nn.Module):
            return None
        moves = any(True for _ in loss.parameters())
        if not moves and not any(name.startswith("loss.") for name in self.loss_record.changed()):
            return None
        if hasattr(self.module, "loss"):
            raise UserError(
                "the loss has parameters of its own, which are kept as `loss.<name>`, but "
                f"{type(self.module).__name__} has an attribute `loss` already; rename that one"
            )
        return loss

    def _loss_state(self) -> dict[str, torch.Tensor]:
        """Return the trained parts of the loss: its parameters, and the buffers that it changes."""
        if self.trained_loss is None:
            return {}
        changed = self.loss_record.changed()
        named = {f"loss.{name}": p for name, p in self.trained_loss.named_parameters(remove_duplicate=False)}
        return named | {f"loss.{n}": b for n, b in self.trained_loss.named_buffers() if f"loss.{n}" in changed}

    def trainable(self, key: str) -> bool:
        return self.trained.get(key, True)

    def loss(self, model: ConvertedModule, batch: Mapping[str, Any], rngs: Callable | None) -> dict[str, Any]:
        """Return the loss as LossEntry does. rngs: None for evaluation mode. Raises UserError with torch's own error if
        JAX cannot compute an operator and torch cannot either: shapes that are seen only in the computation."""
        entries = {key: batch[key] for key in self.entries}
        try:
            return self.loss_record.run(model, (entries,), rngs)
        except OperatorFailed as error:
            raise self._fault_in_torch() or error from error.__cause__

    def _fault_in_torch(self) -> UserError | None:
        """Return the error that torch raises for a batch of zeros; None if it computes the loss."""
        try:
            zeros = jax.tree.map(lambda leaf: to_torch(np.zeros(leaf.shape, leaf.dtype)), self.shapes)
            LossEntry(copy.deepcopy(self.module), self.criterion, self.plan)(zeros)
        except Exception as error:  # whatever torch or the module raises
            fault = UnsupportedModel(
                type(self.module).__name__,
                [Obstacle(f"{type(error).__name__}: {one_line(error)}", exception_line(error))],
                ADVICE_FAULT,
            )
            fault.__cause__ = error
            return _wrong_call(fault, self.plan.shown(self.module), self.criterion)
        return None

    def outputs(self, model: ConvertedModule, batch: Mapping[str, Any]) -> Any:
        """Return evaluation outputs that have one row per sample, by name if there are several."""
        return _per_sample(self._call(model, batch), self._rows(batch))

    def call(self, module: torch.nn.Module, batch: Mapping[str, Any]) -> Any:
        """Return the same as `outputs`, computed by the torch module."""
        with torch.no_grad():
            return _per_sample(self._call(module, batch), self._rows(batch))

    def _call(self, module: Any, batch: Mapping[str, Any]) -> Any:
        """Return the module's outputs without passing the target, or with it if torch refuses the call without."""
        try:
            return self.plan.call(module, dict(batch), with_target=False)
        except Exception as error:
            if self.plan.asks or self.plan.target not in self.plan.named:
                raise
            if isinstance(error, UnsupportedModel) and not error.fails_in_torch:
                raise
            self.plan = dataclasses.replace(self.plan, asks=True)
            return self.plan.call(module, dict(batch), with_target=False)

    def torch_loss(self, module: torch.nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
        """Return the same as `loss`, computed by the torch module."""
        wide = {key: value.long() if value.dtype == torch.int32 else value for key, value in batch.items()}
        entries = {key: wide[key] for key in self.entries}
        own: Any = getattr(module, "loss", None)
        criterion = own if self.trained_loss is not None and own is not None else self.criterion
        return LossEntry(module, criterion, self.plan)(entries)["value"]

    def eval_sums(self, outputs: Any, batch: Mapping[str, Any], valid: Any) -> dict[str, Any]:
        """Count correct and seen rows, for an output [batch, class] and a target int [batch]. valid: bool [batch].

        Rows that the loss ignores (ignore_index) and rows with a negative target, which is no class, are left out.
        """
        logits: Any = main_output(outputs)
        target: Any = batch.get(self.plan.target) if self.plan.target else None
        if getattr(logits, "ndim", None) != 2 or getattr(target, "ndim", None) != 1:
            return {}
        if not jnp.issubdtype(target.dtype, jnp.integer):
            return {}
        seen = valid & (target >= 0)
        for ignored in self._ignored:
            seen &= target != ignored
        return {"correct": jnp.sum((jnp.argmax(logits, -1) == target) & seen), "seen": jnp.sum(seen)}

    @property
    def _ignored(self) -> set[int]:
        """Return the targets (ignore_index) that the loss's modules ignore; the module's own if it computes the
        loss."""
        owner = self.module if self.criterion is None else self.criterion
        parts = owner.modules() if isinstance(owner, torch.nn.Module) else ()
        found = (getattr(part, "ignore_index", None) for part in parts)
        return {index for index in found if isinstance(index, int)}

    def _rows(self, batch: Mapping[str, Any]) -> int:
        """Return the number of rows of every entry; if entries differ, that of the target."""
        rows = lambda entries: {leaf.shape[0] if leaf.ndim else 0 for leaf in pytree.tree_leaves(entries)}
        found = rows([batch[key] for key in self.entries])
        return next(iter(found if len(found) == 1 else rows(batch.get(self.plan.target or "")) or found))

    @staticmethod
    def metrics(sums: Mapping[str, Any]) -> dict[str, float]:
        """Compute accuracy from the sums of a whole split."""
        if "seen" not in sums:
            return {}
        return {"accuracy": float(sums["correct"]) / max(float(sums["seen"]), 1.0)}

    @property
    def couples_samples(self) -> bool:
        """Return True if a sample's loss certainly depends on others in its batch: by batch statistics."""
        return any(isinstance(inner, torch.nn.modules.batchnorm._BatchNorm) for inner in self.module.modules())

    def copy(self) -> torch.nn.Module:
        """Return a copy of the torch module with its own weights."""
        twin: Any = copy.deepcopy(self.module)
        if self.trained_loss is not None:
            twin.loss = copy.deepcopy(self.trained_loss)
            kept = self._loss_state()
            for path, part in twin.loss.named_modules():
                constant = [name for name in part._buffers if ".".join(filter(None, ("loss", path, name))) not in kept]
                part._non_persistent_buffers_set.update(constant)  # exported files do not contain them
        twin.definition = self
        return twin


def _wrong_call(error: UnsupportedModel, called: str, loss: Callable | None) -> UserError:
    fault = error.__cause__
    if isinstance(fault, UserError):  # raised by LossEntry: no loss among the outputs
        return fault
    if fault is not None and in_criterion(fault):
        name = getattr(loss, "__name__", type(loss).__name__)
        return UserError(
            f"the loss {name} fails in torch on the output of {called}: {error.obstacles[0]}\n"
            "Mend the loss, or what it compares, until it runs in torch."
        )
    return UserError(
        f"{error} It was called as {called}; name the Dataset's entries after forward's arguments, or list those that "
        "it takes in model.inputs."
    )


def _per_sample(outputs: Any, batch: int) -> Any:
    """Return one tensor, or a dict of those whose first axis is the sample."""
    if isinstance(outputs, dict) or hasattr(outputs, "items"):
        named = dict(outputs.items())
    elif isinstance(outputs, (tuple, list)):
        named = {str(index): value for index, value in enumerate(outputs)}
    else:
        return outputs
    return {k: v for k, v in named.items() if hasattr(v, "shape") and len(v.shape) and v.shape[0] == batch}
