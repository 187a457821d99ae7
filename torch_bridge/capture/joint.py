"""Forward pass and torch's own backward pass of a loss as one ATen graph, for a compiled step."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from torch_bridge.capture import decompositions, torch_api
from torch_bridge.capture.aten_program import AtenProgram, Numbers
from torch_bridge.capture.attention import formula_if_twice, one_operator
from torch_bridge.capture.replay import Replay, check_backward
from torch_bridge.lowering.errors import CannotRecord
from torch_bridge.lowering.table import Call


@dataclasses.dataclass(frozen=True)
class Captured:
    """A graph of Dynamo's, with the gradients of one of its outputs.

    program: its inputs are the graph's, in order; see AtenProgram for how numbers among them reach the program.
    mutated: positions of the inputs that the graph writes. outputs: of each output of the graph its torch dtype, or
    ("number",) for a number that is known after the call, or ("constant", value). gradients: positions of the inputs
    that the loss depends on, among `differentiable`; torch leaves grad of the others None.
    """

    program: AtenProgram
    mutated: tuple[int, ...]
    outputs: tuple[Any, ...]
    gradients: tuple[int, ...]

    def run(self, arrays: Sequence[Any], numbers: Numbers, call: Call) -> tuple[dict[int, Any], list, dict[int, Any]]:
        """Compute, inside jax.jit or outside, the new values of `mutated` by position, the outputs in order (constants
        included), and the gradients by position. arrays, numbers: as AtenProgram.run takes them."""
        results = self.program.run(arrays, numbers, call)
        count = len(self.mutated)
        kept = iter(results[count : len(results) - len(self.gradients)])
        outputs = [kind[1] if _is_constant(kind) else next(kept) for kind in self.outputs]
        gradients = results[len(results) - len(self.gradients) :] if self.gradients else []
        return (
            dict(zip(self.mutated, results[:count], strict=True)),
            outputs,
            dict(zip(self.gradients, gradients, strict=True)),
        )

    def computes_as(self, other: "Captured") -> bool:
        """Return True if both are the same operators on inputs of the same sizes: one program runs both."""
        return _alike(self) is not None and _alike(self) == _alike(other)


def _alike(captured: Captured) -> tuple | None:
    """Return what makes a graph what it is; None for one with constants, or with sizes or numbers that may change."""
    program = captured.program
    values = [node.meta.get("val") for node in program.inputs]
    changes = lambda value: not isinstance(value, torch.Tensor) or any(type(size) is not int for size in value.shape)
    if any(map(changes, values)) or any(node.op == "get_attr" for node in program.module.graph.nodes):
        return None
    forms = tuple((value.dtype, tuple(value.shape), value.device) for value in values)
    return program.module.code, forms, captured.mutated, captured.outputs, captured.gradients


def joint_graph(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], differentiable: Sequence[int], loss_index: int
) -> Captured:
    """Trace Dynamo's graph, and torch.autograd.grad of one of its outputs, into one functional ATen graph.

    gm, example_inputs: what Dynamo gives to a backend; real tensors do too. differentiable: positions of the inputs to
    differentiate by; each counts as a leaf without hooks. loss_index: position among the graph's
    outputs, which are a flat tuple; the loss must be a scalar. Gradients that the code itself asks for
    (autograd.Function, checkpoint, hooks, torch.autograd.grad, no_grad) are plain operators of the graph. Attention is
    one operator with its own backward, which a fused kernel may compute.

    Raises CannotRecord naming the operators that have no lowering, and whatever torch raises for a loss that has no
    gradient.
    """
    check_backward(gm)
    shapes = [size for value in example_inputs if isinstance(value, torch.Tensor) for size in value.shape]
    changes = not all(type(size) is int for size in shapes)  # warnings would show symbols, and have been shown before
    seen: dict[str, Any] = {}

    def step(*arguments: Any) -> list:
        inputs = list(arguments)
        with torch.enable_grad():
            for place in differentiable:
                inputs[place] = inputs[place].detach().requires_grad_()
            leaves = [inputs[place] for place in differentiable]
            with torch.fx.traceback.preserve_node_meta():  # the user's lines
                outputs = list(Replay(gm, mode, warns=not changes).run(*inputs))
            grads: list[Any] = []
            if leaves:
                grads = list(torch.autograd.grad(outputs[loss_index], leaves, allow_unused=True))
        seen["gradients"] = [place for place, grad in zip(differentiable, grads, strict=True) if grad is not None]
        seen["outputs"] = [_kind(output) for output in outputs]
        outputs = [output.detach() if isinstance(output, torch.Tensor) else output for output in outputs]
        return [
            *(output for output, kind in zip(outputs, seen["outputs"], strict=True) if not _is_constant(kind)),
            *(grad for grad in grads if grad is not None),
        ]

    with formula_if_twice(gm), one_operator() as mode:
        graph, mutated = torch_api.functional_graph(step, example_inputs, decompositions.rules_with_factors())
    if why := decompositions.refusal(graph):
        raise CannotRecord(why)
    return Captured(AtenProgram(graph), tuple(mutated), tuple(seen["outputs"]), tuple(seen["gradients"]))


def _kind(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.dtype
    if isinstance(output, torch.SymInt | torch.SymFloat | torch.SymBool):
        return ("number",)
    return ("constant", output)


def _is_constant(kind: Any) -> bool:
    return isinstance(kind, tuple) and kind[0] == "constant"
