"""Record the outputs of a torch module's layers while its recorded graph runs in JAX."""

from typing import Any

import jax
import numpy as np
import torch

from torch_bridge.comparison import Records
from torch_bridge.records import PREFIX


class LayerRecord:
    """Collect, for every submodule call, the values that are used outside that call.

    The submodule's outputs are among them. A value that it computes for another layer may be too.
    """

    def __init__(self, graph_module: torch.fx.GraphModule):
        self._calls: dict[torch.fx.Node, list[str]] = {}  # node -> calls that its value leaves
        self._last: dict[str, int] = {}
        self._paths: dict[str, str] = {}
        stacks = {node: self._stack(node) for node in graph_module.graph.nodes}
        for place, (node, stack) in enumerate(stacks.items()):
            self._last |= dict.fromkeys(stack, place)
            self._paths |= stack
            leaving = [key for key in stack if any(key not in stacks[user] for user in node.users)]
            if leaving:
                self._calls[node] = leaving
        self._order = sorted(self._last, key=self._last.__getitem__)
        self._values: dict[str, list[Any]] = {}
        self._names: list[str] = []

    @staticmethod
    def _stack(node: torch.fx.Node) -> dict[str, str]:
        """Return the submodule calls around a node: {key of the call: path of the submodule}."""
        stack = node.meta.get("nn_module_stack") or {}
        return {key: path.removeprefix(PREFIX) for key, (path, _) in stack.items() if path.startswith(PREFIX)}

    def begin(self) -> None:
        self._values = {key: [] for key in self._order}

    def observe(self, node: torch.fx.Node, value: Any) -> Any:
        """Keep the value of a node if it is used outside its submodule call; return it."""
        for key in self._calls.get(node, ()):
            self._values[key] += [leaf for leaf in jax.tree.leaves(value) if hasattr(leaf, "shape")]
        return value

    def outputs(self) -> list[list[Any]]:
        """Return the values of every call, in the order in which the calls end."""
        self._names = [self._paths[key] for key in self._order]
        return [self._values[key] for key in self._order]

    def named(self, outputs: list[list[np.ndarray]]) -> Records:
        """Return fetched `outputs` as (submodule name, arrays) pairs."""
        return [(name, [*map(np.asarray, values)]) for name, values in zip(self._names, outputs, strict=True)]
