"""A functional ATen graph as a function of JAX arrays: the interpreter runs it operator by operator.

What Python computes of numbers alone leaves the graph: `numbers` computes it on the host before each call. A number
that is a size of a tensor becomes a constant of the compiled program, any other one of its inputs.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from torch_bridge.capture.host_arithmetic import HostArithmetic
from torch_bridge.lowering import wide_integers
from torch_bridge.lowering.errors import WideIntegers
from torch_bridge.lowering.interpreter import run_graph
from torch_bridge.lowering.table import Call

Number = bool | int | float


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The numbers of one call. sizes: constants of the program, hashable. free: inputs of the program."""

    sizes: tuple[Number, ...]
    free: tuple[Number, ...]


class AtenProgram:
    """An ATen graph whose inputs are tensors and Python numbers, and whose outputs are tensors, numbers and None.

    tensors: positions of the tensors that the graph reads among its inputs. passed: output -> input that it is.
    hand_on: compute outputs that are inputs too; otherwise `run` returns None for them, and inputs that the graph only
    hands on are not among `tensors`.
    """

    def __init__(self, module: torch.fx.GraphModule, hand_on: bool = True):
        flatten_outputs(module)
        self._hand_on = hand_on
        self.host = HostArithmetic(module)
        self.module = module
        self.inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        results: Any = output_of(module).args[0]
        self.outputs = list(results)
        is_tensor = lambda node: isinstance(node.meta.get("val"), torch.Tensor)
        self.tensors = [i for i, node in enumerate(self.inputs) if is_tensor(node) and self._is_read(node)]
        places = {node: place for place, node in enumerate(self.inputs)}
        self.passed = {o: places[node] for o, node in enumerate(self.outputs) if node in places}
        self._sort_numbers()

    def _sort_numbers(self) -> None:
        self._sizes = [i for i in self.host.numbers if self.host.is_size[i]]
        self._free = [i for i in self.host.numbers if not self.host.is_size[i] and self._is_read(self.inputs[i])]

    def freeze_numbers(self) -> bool:
        """Make all numbers constants of the program, for operators that must know them. Return False if they were."""
        changed = self.host.freeze()
        self._sort_numbers()
        return changed

    def numbers(self, inputs: Sequence[Any]) -> tuple[Numbers, list[Any]]:
        """Compute the numbers of a call. inputs: tensors and numbers as torch passes them. Return them, and all inputs
        of the graph: those given, and the numbers that Python computes of them."""
        every = [*inputs, *self.host.compute(inputs)] if self.host.computed else list(inputs)
        sizes, free = (tuple([every[i] for i in places]) for places in (self._sizes, self._free))
        if any(type(number) is int and not -(2**31) <= number < 2**31 for number in free):
            raise WideIntegers("it computes with a Python integer that does not fit into 32 bits, which JAX counts in")
        return Numbers(sizes, free), every

    def run(self, arrays: Sequence[Any], numbers: Numbers, call: Call) -> list[Any]:
        """Compute the outputs, inside jax.jit or outside. arrays: of `tensors`, in order; int64 in 32 bits unless its
        values need more. Outputs are arrays, Python numbers and None, in the graph's order.

        Raises NoForm or OperatorFailed for an operator that JAX cannot compute for these values.
        """
        values: list[Any] = [None] * len(self.inputs)
        for place, array in zip(self.tensors, arrays, strict=True):
            values[place] = wide_integers.array(array)
        for places, given in ((self._sizes, numbers.sizes), (self._free, numbers.free)):
            for place, number in zip(places, given, strict=True):
                values[place] = number
        for place, node in enumerate(self.inputs):
            if _is_int64(node) and getattr(values[place], "dtype", None) != np.int64:
                call.bounds[node] = wide_integers.COUNTER
        results = run_graph(self.module, values, call)
        return results if self._hand_on else [None if o in self.passed else r for o, r in enumerate(results)]

    def read(self) -> list[torch.fx.Node]:
        """Return the placeholders of the tensors that the graph reads."""
        return [self.inputs[place] for place in self.tensors]

    def _is_read(self, node: torch.fx.Node) -> bool:
        return any(self._hand_on or user.op != "output" for user in node.users)


def output_of(module: torch.fx.GraphModule) -> torch.fx.Node:
    (node,) = (node for node in module.graph.nodes if node.op == "output")
    return node


def flatten_outputs(module: torch.fx.GraphModule) -> None:
    """Make the graph return a flat list of nodes and constants."""
    node = output_of(module)
    is_leaf = lambda value: isinstance(value, torch.fx.Node) or value is None
    node.args = (pytree.tree_leaves(node.args[0], is_leaf=is_leaf),)


def _is_int64(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype is torch.int64


def fits(value: np.ndarray) -> bool:
    """Return True if int64 numbers may be computed with in 32 bits: they are within `wide_integers.COUNTER`."""
    low, high = wide_integers.COUNTER
    return not value.size or (low <= int(value.min()) and int(value.max()) <= high)
