"""A recorded graph as a function that torch can call and differentiate."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import torch

from jaxtrain.runtime.prng import Rngs
from jaxtrain.runtime.waits import Waits, inputs_of
from torch_bridge.function import as_torch
from torch_bridge.lowering.interpreter import Graph
from torch_bridge.lowering.table import Call
from torch_bridge.lowering.view_outputs import view, views_of_given


class CallProgram:
    """A graph that torch can call.

    waits: tells who waits for its compilations. reached: names of the parameters that a gradient of its outputs
    reaches.
    """

    def __init__(self, graph: Graph, waits: Waits):
        self.graph, self._waits, self._purpose = graph, waits, ""
        self.reached = graph.differentiable()
        self.views = views_of_given(graph)
        self.constants: dict[int, Any] = {}  # outputs that are not tensors, by index; known after tracing
        self.run = as_torch(self._run, slim=not graph.loops, reaches=self._reaches, wait=self._wait)
        self._draws: bool | None = None  # whether it draws random numbers; known after tracing
        self._carrying: dict[frozenset[str], list[bool]] = {}

    def __call__(
        self, state: dict, leaves: list, trained: frozenset[str], own: Mapping[str, Any]
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        """Run the graph. own: the module's tensors and Python's numbers, for outputs that are one of them unchanged."""
        self._purpose = self._purpose or inputs_of([tuple(x.shape) for x in leaves if isinstance(x, torch.Tensor)])
        before = torch.get_rng_state()
        seed = torch.zeros((), dtype=torch.int64) if self._draws is False else torch.randint(1 << 31, ())
        tensors, changed = self.run(state, leaves, seed)
        if not self._draws:  # nothing random in it: undo the draw of the seed
            torch.set_rng_state(before)
        if trained not in self._carrying:
            self._carrying[trained] = self.graph.carries_gradient(set(trained))
        feed = iter(tensors)
        outputs = []
        for place, carries in enumerate(self._carrying[trained]):
            value = self.constants[place] if place in self.constants else next(feed)
            outputs.append(value if carries or not isinstance(value, torch.Tensor) else value.detach())
        if handed := self.graph.handed_on:
            given = {**dict(zip(self.graph.inputs, leaves, strict=True)), **own}
            same = (torch.Tensor, int, float)
            kept = {place: given[name] for place, name in handed.items() if isinstance(given.get(name), same)}
            outputs = [kept.get(place, value) for place, value in enumerate(outputs)]
        if self.views:
            given: dict = {place: own.get(name) for place, name in self.graph.placeholders if name is not None}
            given |= dict(zip(self.graph.inputs, leaves, strict=True))
            for place, node in self.views.items():
                outputs[place] = view(node, given)
        return self.graph.in_torch(outputs), changed

    def _wait(self, what: str) -> contextlib.AbstractContextManager:
        return self._waits.during(what, self._purpose)

    def _reaches(self, given: Sequence[bool]) -> tuple:
        """Return for each argument of `run` whether gradients of these results reach it."""
        places = range(len(self.graph.carries_gradient(set())))
        outputs = (place for place in places if place not in self.constants)  # in `given`, changed buffers follow
        found = self.graph.differentiable([place for place, has in zip(outputs, given, strict=False) if has])
        of_state = {name: name in found for name in self.graph.state}
        return (of_state, [name in found for name in self.graph.inputs], False), {}

    def _run(self, state: dict, leaves: list, seed: jax.Array) -> tuple[list, dict]:
        rngs = _CountedRngs(jax.random.key(seed))
        outputs, changed = self.graph.run_leaves(state, leaves, Call(rngs))
        self._draws = rngs.drawn
        self.constants = {place: value for place, value in enumerate(outputs) if not hasattr(value, "dtype")}
        return [value for value in outputs if hasattr(value, "dtype")], changed


class _CountedRngs(Rngs):
    """Random keys that record whether any key was drawn."""

    drawn = False

    def __call__(self) -> jax.Array:
        self.drawn = True
        return super().__call__()
