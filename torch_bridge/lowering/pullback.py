"""Torch's own backward pass of a graph, as the derivative that JAX takes of it.

Code with a part in its own backward pass (hooks, autograd.Function, checkpoints, gradients that it asks for) has a
derivative that only torch's autograd knows. It is a second graph here, of the same inputs.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.custom_derivatives import SymbolicZero

from torch_bridge.lowering.errors import CannotRecord
from torch_bridge.lowering.nested_graphs import is_array
from torch_bridge.lowering.operators.derivatives import underived
from torch_bridge.lowering.table import Call

RunGraph = Callable[[torch.fx.GraphModule, Sequence[Any], Call], list]


@dataclasses.dataclass(frozen=True)
class Pullback:
    """The gradients of a graph's inputs as a graph of the same placeholders and of slopes, which come last.

    outputs: of each slope, the positions of the graph's outputs that it belongs to. inputs: positions of the
    placeholders that the gradients belong to, in the order of the results. passed: output -> the placeholder that it
    is. closed: positions of placeholders that no gradient may be asked of.
    """

    module: torch.fx.GraphModule
    outputs: tuple[tuple[int, ...], ...]
    inputs: tuple[int, ...]
    passed: Mapping[int, int]
    closed: frozenset[int]

    def run(self, forward: torch.fx.GraphModule, arguments: Sequence[Any], call: Call, run_graph: RunGraph) -> list:
        """Compute the outputs of the graph `forward`, whose gradients are those of this one. Both draw the same random
        numbers: the backward pass computes again what it needs, and XLA merges the two."""
        arrays = {place: value for place, value in enumerate(arguments) if is_array(value)}
        plain: dict[int, Any] = {}  # outputs that are no arrays, such as sizes

        def compute(graph: torch.fx.GraphModule, arrays: dict, valid: Any, base: Any, slopes: Sequence = ()) -> list:
            places = [node for node in graph.graph.nodes if node.op == "placeholder"]
            bounds = {place: known for place, known in zip(places, bounded, strict=False) if known is not None}
            inner = dataclasses.replace(call, valid=valid, base=base, bounds=bounds, _drawn_for={})
            given = [arrays.get(place, value) for place, value in enumerate(arguments)]
            return run_graph(graph, [*given, *slopes], inner)

        bounded = [call.bounds.get(node) for node in forward.graph.nodes if node.op == "placeholder"]

        @jax.custom_vjp
        def function(arrays, valid, base):
            results = compute(forward, arrays, valid, base)
            plain.update({place: value for place, value in enumerate(results) if not is_array(value)})
            return {place: value for place, value in enumerate(results) if place not in plain}

        def ahead(arrays, valid, base):
            if any(arrays[place].perturbed for place in self.closed & arrays.keys()):
                raise CannotRecord(_CLOSED)
            known = jax.tree.map(lambda primal: primal.value, (arrays, valid, base), is_leaf=_is_primal)
            return function(*known), known

        def back(known, slopes):
            arrays, valid, base = known
            slopes = {place: as_torch(_dense(slope)) for place, slope in slopes.items()}
            given = [sum(slopes[place] for place in places) for places in self.outputs]
            found = compute(self.module, arrays, valid, base, given)
            gradients = dict(zip(self.inputs, found, strict=True))
            for place, value in self.passed.items():
                gradients[value] = gradients.get(value, 0) + slopes[place]
            moving = [value for value in (*arrays.values(), *given) if not isinstance(value, np.ndarray)]
            once = lambda gradient: underived(as_torch(gradient), _ONCE, *moving)
            return {place: once(gradients[place]) if place in gradients else None for place in arrays}, None, None

        function.defvjp(ahead, back, symbolic_zeros=True)
        results = plain | function(arrays, call.valid, call.key())
        return [results[place] for place in range(len(results))]

    def reaches(self, outputs: Collection[int]) -> set[int]:
        """Return the positions of the placeholders whose gradients depend on the slopes of these outputs."""
        nodes = list(self.module.graph.nodes)
        places = [node for node in nodes if node.op == "placeholder"]
        slopes = zip(reversed(places), reversed(self.outputs), strict=False)
        moved = {node for node, ends in slopes if not set(ends).isdisjoint(outputs)}
        for node in nodes:
            if not moved.isdisjoint(node.all_input_nodes):
                moved.add(node)
        gradients: Any = nodes[-1].args[0]
        reached = {place for place, node in zip(self.inputs, gradients, strict=True) if node in moved}
        return reached | {place for output, place in self.passed.items() if output in outputs}


_ONCE = (
    "the gradient of code with hooks, an autograd.Function, a checkpoint or a gradient of its own is differentiated "
    "again, and JAX has torch's backward pass once"
)
_CLOSED = "a gradient by an input of a module with backward hooks: in torch the hooks would be given more"


def _is_primal(value: Any) -> bool:
    return hasattr(value, "perturbed")


def _dense(slope: Any) -> jax.Array:
    """Return a slope as an array: JAX gives zeros by their form."""
    zero: Any = slope
    return jnp.zeros(zero.shape, zero.dtype) if isinstance(slope, SymbolicZero) else slope


def as_torch(slope: jax.Array) -> jax.Array:
    """Return a gradient as torch has it, the conjugate of JAX's, or back."""
    return jnp.conj(slope) if jnp.iscomplexobj(slope) else slope
