"""Dynamo's graph run again for JAX to differentiate: where torch's autograd ends, the graph says so.

JAX differentiates whatever a graph computes. Torch does not: under no_grad, behind detach() and in operators without a
derivative its gradient ends. While the graph runs here under torch's autograd, each result that has lost its gradient
is marked by an operator, `stop_gradient`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from torch_bridge.capture.module_hooks import has_module_hooks
from torch_bridge.capture.replay import Replay, name_of, nodes_of, writes
from torch_bridge.lowering.errors import Unfollowed

_STATISTICS = ("batch_norm", "instance_norm")
_OWN_GRADIENTS = (  # of functions and methods of torch by which code takes a part in the backward pass itself
    *("grad", "backward", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_"),
    *("_enter_inference_mode", "_vmap_increment_nesting", "_grad_increment_nesting", "_jvp_increment_nesting"),
)


@torch.library.custom_op("torch_bridge::stop_gradient", mutates_args=())
def stop_gradient(value: torch.Tensor) -> torch.Tensor:
    """Return the value, of which no gradient is taken."""
    return value.clone()


@stop_gradient.register_fake
def _(value):
    return torch.empty_like(value)


class OwnBackward(Unfollowed):
    """Error for code with a part in its own backward pass, which torch's autograd knows and JAX does not."""


def check(gm: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> None:
    """Raise OwnBackward for a graph in which the code has a part in the backward pass. inputs: real ones."""
    if has_module_hooks(gm) or any(value._backward_hooks for value in inputs):
        raise OwnBackward("a module or a tensor has a hook on its gradients")
    for node in nodes_of(gm):
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise OwnBackward(f"it uses {node.target}")
        if node.op in ("call_function", "call_method") and name_of(node) in _OWN_GRADIENTS:
            raise OwnBackward(f"it calls {name_of(node)}")


class CuttingReplay(Replay):
    """Run a graph of Dynamo's under torch's autograd, with `stop_gradient` wherever a gradient ends.

    Raises OwnBackward for a write that autograd does not see to a tensor that has a gradient, or that shares its memory
    with a result at which a gradient ends: there a functional graph and torch part.
    """

    def run(self, *args: Any, **options: Any) -> Any:
        self._graded: set[Any] = {_memory(value) for value in _tensors(args) if value.requires_grad}
        self._shared: set[Any] = set()  # memory of results at which a gradient ends and of what they are views of
        return super().run(*args, **options)

    def run_node(self, node: torch.fx.Node) -> Any:
        if node.op not in ("call_function", "call_method"):
            return super().run_node(node)
        used = _tensors([self.env[each] for each in node.all_input_nodes])
        from_graded = any(value.requires_grad for value in used)
        written = list(self._written(node)) if writes(node) else []
        for value in written:
            unseen = not (torch.is_grad_enabled() and value.requires_grad)
            if _memory(value) in self._shared or (unseen and _memory(value) in self._graded):
                raise OwnBackward("it writes, past autograd, to a tensor that has a gradient")
        result = super().run_node(node)
        self._graded |= {_memory(value) for value in _tensors([result, *written]) if value.requires_grad}
        if not from_graded or name_of(node) in _STATISTICS:
            return result
        for value in written:
            if not value.requires_grad and value.is_floating_point():
                with torch.no_grad():
                    value.copy_(stop_gradient(value))
        taken = {id(value) for value in used}
        return pytree.tree_map_only(
            torch.Tensor, lambda value: value if id(value) in taken else self._cut(value, used), result
        )

    def _cut(self, value: torch.Tensor, used: Sequence[torch.Tensor]) -> torch.Tensor:
        if value.requires_grad or not (value.is_floating_point() or value.is_complex()):
            return value
        if _memory(value) in {_memory(source) for source in used}:
            self._shared |= {_memory(value)}
        with torch.no_grad():
            cut = stop_gradient(value)
        if _memory(value) in self._shared:
            self._shared |= {_memory(cut)}
        return cut

    def _written(self, node: torch.fx.Node) -> Iterator[torch.Tensor]:
        targets: list[Any] = list(node.args[:1])
        if name_of(node) in _STATISTICS:
            targets = [*node.args[1:3], node.kwargs.get("running_mean"), node.kwargs.get("running_var")]
        targets.append(node.kwargs.get("out"))
        yield from _tensors([self.env[each] for each in targets if isinstance(each, torch.fx.Node)])


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]


def _memory(value: torch.Tensor) -> Any:
    """Return a key that tensors share that share memory, while torch traces, too."""
    return StorageWeakRef(value.untyped_storage())
