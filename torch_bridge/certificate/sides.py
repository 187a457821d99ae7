"""Run one batch through a torch module and its loss in torch and in JAX; compare layers, loss, gradients, buffers."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch
from torch.utils import _pytree as pytree

from jaxtrain.runtime.prng import Rngs
from torch_bridge.certificate.layers import LayerRecord
from torch_bridge.comparison import GRADIENTS, OUTPUTS, Difference, Records, distance, recording_torch
from torch_bridge.datasets import to_numpy, to_torch
from torch_bridge.lowering.interpreter import Graph
from torch_bridge.lowering.table import Call
from torch_bridge.module_tensors import narrow, snapshot, to_array
from torch_bridge.training.loss_entry import LossEntry
from torch_bridge.training.torch_task import TorchTask

ROUNDING = 1e-3  # relative to the largest gradient: below this, differences count as rounding


@dataclasses.dataclass(frozen=True)
class Side:
    """Results of one batch on one side.

    layers: (name, outputs) in the order in which the calls finish; for JAX, candidates for a layer's outputs.
    gradients: by parameter, zeros where there is none. buffers: changed floating-point buffers after the call. changed:
    names of all tensors that the call changed.
    """

    layers: Records
    loss: np.ndarray
    gradients: dict[str, np.ndarray]
    buffers: dict[str, np.ndarray]
    changed: frozenset[str]


def modules_of(definition: TorchTask) -> dict[str, torch.nn.Module]:
    """Return the module under the name "", and under "loss" the loss module if it is trained too."""
    loss = {} if definition.trained_loss is None else {"loss": definition.trained_loss}
    return {"": definition.module, **loss}


def tensors_of(definition: TorchTask) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return all parameters and buffers by their names in the record, and {tied name: the name that represents it}."""
    modules = modules_of(definition)
    if len(modules) == 1:
        return snapshot({"module": definition.module})
    tensors, aliases = snapshot(modules)
    return {k.removeprefix("."): v for k, v in tensors.items()}, {
        k.removeprefix("."): v.removeprefix(".") for k, v in aliases.items()
    }


def torch_batch(entries: Mapping[str, Any], double: bool = False) -> dict[str, torch.Tensor]:
    """Return a batch as tensors, int32 as int64, torch's default. double: floats in float64."""

    def one(value: Any) -> torch.Tensor:
        tensor = to_torch(value)
        if tensor.dtype == torch.int32:
            return tensor.long()
        return tensor.double() if double and tensor.is_floating_point() else tensor

    return {key: jax.tree.map(one, value) for key, value in entries.items()}


def loss_in_torch(definition: TorchTask, batch: Mapping[str, Any], double: bool = False) -> torch.Tensor:
    """Compute the loss as a user's loop does, in the module's current mode."""
    entries = torch_batch({key: batch[key] for key in definition.entries}, double)
    device = next((p.device for p in definition.module.parameters()), torch.device("cpu"))
    entries = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), entries)
    return LossEntry(definition.module, definition.criterion, definition.plan)(entries)["value"]


def in_torch(definition: TorchTask, batch: Mapping[str, Any], training: bool) -> Side:
    """Run torch's eager code forward and backward. Changes the module's gradients, buffers and mode."""
    for module in modules_of(definition).values():
        module.train(training)
        module.zero_grad(set_to_none=True)
    tensors, _ = tensors_of(definition)
    # Changes are found by value, not by version: some kernels hide their writes.
    before = {name: np.array(to_numpy(tensor)) for name, tensor in tensors.items()}
    with recording_torch(definition.module) as layers:
        loss = loss_in_torch(definition, batch)
    loss.backward()
    trained = {name: p for name, p in tensors.items() if isinstance(p, torch.nn.Parameter) and p.requires_grad}
    gradients = {n: np.zeros(p.shape, np.float32) if p.grad is None else to_numpy(p.grad) for n, p in trained.items()}
    same = lambda name: np.array_equal(before[name], to_numpy(tensors[name]), equal_nan=before[name].dtype.kind == "f")
    changed = frozenset(name for name in tensors if not same(name))
    buffers = {name: np.array(to_numpy(tensors[name])) for name in changed if tensors[name].is_floating_point()}
    return Side(layers, np.array(to_numpy(loss)), {n: np.array(g) for n, g in gradients.items()}, buffers, changed)


class JaxSide:
    """Recorded graph of a definition's loss, compiled with its gradient once per mode and shape."""

    def __init__(self, definition: TorchTask):
        self.definition = definition
        self._programs: dict[int, tuple[LayerRecord, Any]] = {}

    def __call__(self, batch: Mapping[str, Any], training: bool) -> Side:
        """Compute from the module's current weights; the module itself is not changed."""
        definition = self.definition
        entries = {key: batch[key] for key in definition.entries}
        graph, leaves = definition.loss_record.graph((entries,), training)
        tensors, aliases = tensors_of(definition)
        arrays = {name: to_array(tensor) for name, tensor in tensors.items()}
        trained = {n for n, p in tensors.items() if isinstance(p, torch.nn.Parameter) and p.requires_grad}
        if id(graph) not in self._programs:  # ids stay unique: the record keeps its graphs alive
            self._programs[id(graph)] = _program(graph, aliases, training)
        record, run = self._programs[id(graph)]
        params, others = ({n: a for n, a in arrays.items() if (n in trained) == own} for own in (True, False))
        given = [narrow(leaf) if hasattr(leaf, "shape") else leaf for leaf in leaves]
        with jax.default_matmul_precision("highest"):
            (loss, (outputs, changed)), gradients = jax.device_get(run(params, others, given))
        gradients = {n: np.conj(g) if np.iscomplexobj(g) else g for n, g in gradients.items()}  # as torch has it
        written = {name: value for name, value in changed.items() if not np.array_equal(value, arrays[name])}
        buffers = {name: value for name, value in written.items() if np.issubdtype(value.dtype, np.floating)}
        return Side(record.named(outputs), loss, gradients, buffers, frozenset(written))


def _program(graph: Graph, aliases: Mapping[str, str], training: bool) -> tuple[LayerRecord, Any]:
    """Return the layer record and a compiled function: (trained, other arrays, inputs) -> loss with aux, gradients."""
    record = LayerRecord(graph.module)

    def compute(params: dict[str, Any], others: dict[str, Any], given: list) -> Any:
        values = others | params
        state = {name: values[aliases.get(name, name)] for name in graph.state}
        record.begin()
        call = Call(Rngs(jax.random.key(0)) if training else None, observe=record.observe)
        outputs, changed = graph.run(state, given, call)
        return outputs["value"], (record.outputs(), changed)

    return record, jax.jit(jax.value_and_grad(compute, has_aux=True))


def layer_differences(ours: Side, theirs: Side, limit: float = OUTPUTS) -> tuple[list[Difference], list[str]]:
    """Compare each torch layer's outputs with the nearest JAX output of the same shape; also return unmatched layers.

    A torch output that nothing uses, such as one of a list of hidden states, has no counterpart in JAX. It is left out
    if all JAX candidates belong to other outputs.
    """
    calls: dict[str, list[list[np.ndarray]]] = {}
    for name, candidates in ours.layers:
        calls.setdefault(name, []).append(candidates)
    counts: dict[str, int] = {}
    found, unmatched = [], []
    for name, outputs in theirs.layers:
        counts[name] = counts.get(name, 0) + 1
        label = name if counts[name] == 1 else f"{name}, call {counts[name]}"
        candidates = calls[name].pop(0) if calls.get(name) else []
        tables = [_distances(output, candidates) for output in outputs]
        taken = {place for table in tables for place, size in table.items() if size <= limit}
        used = [table for table in tables if not table.keys() <= taken or min(table.values(), default=1.0) <= limit]
        if used:
            found.append(Difference("output", label, max(min(table.values()) for table in used), limit))
        else:
            unmatched.append(label)
    return found, unmatched


def _distances(output: np.ndarray, candidates: list[np.ndarray]) -> dict[int, float]:
    """Return the distance of every candidate with the output's shape, by its index."""
    return {place: distance(other, output) for place, other in enumerate(candidates) if other.shape == output.shape}


def gradient_differences(ours: Side, theirs: Side, limit: float = GRADIENTS) -> list[Difference]:
    """Compare the gradient of every parameter, from the last layer to the first."""
    largest = max((float(np.linalg.norm(grad)) for grad in theirs.gradients.values()), default=0.0)
    return [
        Difference("gradient", name, distance(ours.gradients[name], grad, ROUNDING * largest), limit)
        for name, grad in reversed(theirs.gradients.items())
    ]


def buffer_differences(ours: Side, theirs: Side, limit: float = OUTPUTS) -> list[Difference]:
    """Compare the buffers that the call changed on either side. Distances are relative to at least ROUNDING times the
    largest buffer, as for gradients: a running mean near zero is only rounding."""
    largest = max((float(np.linalg.norm(buffer)) for buffer in theirs.buffers.values()), default=0.0)
    return [
        Difference("buffer", name, distance(ours.buffers[name], theirs.buffers[name], ROUNDING * largest), limit)
        for name in theirs.buffers
        if name in ours.buffers
    ] + [Difference("buffer", name, float("inf"), limit) for name in sorted(ours.changed ^ theirs.changed)]
