"""Parameters that backward() does not reach: torch leaves their `grad` None, AOTAutograd gives them zeros.

With weight decay, or momentum, an optimizer moves a parameter whose gradient is zero and leaves one that has none. So a
hook on each result of a graph marks the gradient that arrives there. In the graph's backward pass, zeros without the
mark are those that autograd puts in place of none, and what depends on no other gradient gets none.
"""

from collections.abc import Sequence
from typing import Any

import torch

_MARK = "_of_result"


def watch(results: Sequence[Any]) -> None:
    """Mark the gradients of a graph's results when they arrive."""
    for result in results:
        origin = result.grad_fn if isinstance(result, torch.Tensor) else None
        if origin is not None and origin.name() == "CompiledFunctionBackward":
            result.register_hook(_contiguously if result.is_contiguous() else _mark)


def _mark(gradient: Any) -> Any:
    if gradient is not None:
        setattr(gradient, _MARK, True)
    return gradient


def _contiguously(gradient: Any) -> Any:
    """Mark a gradient in the layout of its result: AOTAutograd would copy another, and lose the mark."""
    return _mark(None if gradient is None else gradient.contiguous())


class Tangents:
    """The gradients that a backward graph takes, and which of its outputs depend on which."""

    def __init__(self, module: torch.fx.GraphModule):
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        self._places = {node: place for place, node in enumerate(placeholders) if node.name.startswith("tangents")}
        sources: dict[torch.fx.Node, frozenset[int]] = {}
        for node in module.graph.nodes:
            own = frozenset({self._places[node]} if node in self._places else ())
            sources[node] = own.union(*(sources[used] for used in node.all_input_nodes))
        (output,) = (node for node in module.graph.nodes if node.op == "output")
        self._outputs = [sources.get(node, frozenset()) for node in output.args[0]]

    def unreached(self, inputs: Sequence[Any]) -> frozenset[int]:
        """Return the positions of the outputs that are no gradients: backward() has not come to what they are of."""
        missing = {place for place in self._places.values() if _is_missing(inputs[place])}
        if not missing or len(missing) == len(self._places):
            return frozenset()
        return frozenset(place for place, of in enumerate(self._outputs) if of and of <= missing)


def _is_missing(gradient: Any) -> bool:
    return isinstance(gradient, torch.Tensor) and not hasattr(gradient, _MARK) and not gradient.any()
