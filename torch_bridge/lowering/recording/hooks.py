"""Record backward hooks, and requires_grad_ inside a forward pass.

Tensor.register_hook, on a tensor or on a parameter: what the hook does to a gradient is recorded as operators, and
`enclose_hooks` leads every use of the tensor through them. A hook that cannot be recorded is refused with its line.
requires_grad_(False): later calls see the tensor detached.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import library
from torch.nn.modules import module as modules
from torch.utils import _pytree as pytree

from torch_bridge.lowering.errors import Obstacle, code_line
from torch_bridge.lowering.recording.gradients import GRADIENT, HOOK, drop, following, part, sort

library.define("torch_bridge::hook", "(Tensor cotangent, Tensor x, Tensor slope) -> Tensor")
_numbers = itertools.count()


@library.register_fake("torch_bridge::hook")
def _hook(cotangent, x, slope):
    return torch.empty_like(x)


torch.fx.node.has_side_effect(torch.ops.torch_bridge.hook.default)  # nothing uses it before `enclose_hooks`


class Removable:
    """Handle that `register_hook` returns while recording; an export keeps its hooks, so removing one is refused."""

    def remove(self):
        raise NotImplementedError(
            "a backward hook is removed in the forward pass that registered it; whether it still runs depends on when "
            "backward is called: let the hook itself return its gradient unchanged"
        )


def register(x: torch.Tensor, hook: Callable) -> Removable:
    """Record what `hook` makes of x's gradient. Replaces torch.Tensor.register_hook."""
    if not x.is_floating_point():
        raise NotImplementedError(f"a backward hook on a {x.dtype} tensor has no form in JAX")
    cotangent = torch.ops.torch_bridge.cotangent(x.detach(), next(_numbers))
    given = cotangent.clone()  # the hook may write to it
    version = given._version
    slope = hook(given)
    if slope is None and given._version == version:
        raise NotImplementedError(
            "a backward hook that returns nothing is there for what it does in Python (a print, a list of gradients); "
            "a compiled step would not do it: remove the hook, or let it return the gradient"
        )
    slope = given if slope is None else slope
    torch.ops.torch_bridge.hook(cotangent, x, slope.to(x.dtype).expand_as(x))
    return Removable()


def enclose_hooks(graph_module: torch.fx.GraphModule) -> None:
    """Lead every use of a tensor with hooks through them: the hook registered first sees the gradient first.

    hook(cotangent, x, slope) becomes hook(x, residuals, backward, why), where `backward` computes slope from cotangent,
    and `why` is the reason why its gradient cannot be differentiated again, or "".
    """
    for inner in list(graph_module.modules()):
        if not isinstance(inner, torch.fx.GraphModule):
            continue
        hooks: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        for node in inner.graph.nodes:
            if str(node.target) == HOOK:
                hooks.setdefault(node.args[1], []).append(node)
        for x, nodes in hooks.items():
            bodies = set().union(*(_between(inner.graph, node) for node in nodes))
            apart = {*nodes, *bodies, *_copied(inner.graph, x, {*nodes, *bodies})}
            users = [user for user in x.users if user not in apart]
            previous = x
            for node in reversed(nodes):
                node.args = (node.args[0], previous, node.args[2])
                previous = node
            for user in users:
                asked = user.args[1] if str(user.target) == GRADIENT else None
                user.replace_input_with(x, previous)
                if asked is not None:  # torch.autograd.grad by the tensor returns its hooks' result
                    user.args = (user.args[0], asked, *user.args[2:])
        if hooks:
            sort(inner.graph)
            for node in [node for nodes in hooks.values() for node in nodes]:
                cotangent, x, slope = node.args
                residuals, backward = part(inner, node, [cotangent], [slope])
                node.args = (x, residuals, backward, _derived_in_torch(inner.graph, x, residuals))
                drop(inner.graph, [cotangent])
            inner.recompile()


def _derived_in_torch(graph: torch.fx.Graph, x: Any, residuals: list) -> str:
    """Return why torch leads a second gradient through a hook where JAX leads it past, or "": the tensor's own operator
    keeps its result for backward, or the hook computes with the tensor."""
    while str(x.target) == HOOK:
        x = x.args[0]
    name = str(x.target)
    if x.op == "call_function" and name.split(".")[1:2] and name.split(".")[1] not in _KEEP_NO_RESULT:
        return f"on the result of {name}"
    return "that computes with its own tensor" if following(graph, [x]).intersection(residuals) else ""


_KEEP_NO_RESULT = frozenset(
    "linear addmm mm bmm matmul convolution conv1d conv2d conv3d add sub mul view reshape permute transpose t clone "
    "cat stack select slice unsqueeze squeeze expand".split()
)


def _between(graph: torch.fx.Graph, hook: Any) -> set[torch.fx.Node]:
    """Return the hook's own operators: those after its cotangent, and the cotangent's inputs, which give its shape."""
    cotangent = hook.args[0]
    reached = {cotangent}
    for node in graph.nodes:
        if node is not hook and reached.intersection(node.all_input_nodes):
            reached.add(node)
    return reached.union(cotangent.all_input_nodes)


def _copied(graph: torch.fx.Graph, x: torch.fx.Node, body: set[torch.fx.Node]) -> list[torch.fx.Node]:
    """Copy the operators from x to the hooks' own, which use the tensor without hooks; return the copies."""
    after = {x}
    for node in graph.nodes:
        if node not in body and after.intersection(node.all_input_nodes):
            after.add(node)
    needed, stack = set(), [used for node in body for used in node.all_input_nodes]
    while stack:
        node = stack.pop()
        if node in after and node is not x and node not in body and node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in [node for node in graph.nodes if node in needed]:
        with graph.inserting_after(node):
            copies[node] = graph.node_copy(node, lambda used: copies.get(used, used))
        for user in [user for user in node.users if user in body]:
            user.replace_input_with(node, copies[node])
    return list(copies.values())


@contextlib.contextmanager
def recorded(module: torch.nn.Module, begin: Callable) -> Iterator[None]:
    """While active, each call of the module begins with the attributes that its parameters and buffers have, and with
    the parameters' hooks, unless torch runs them. begin: takes the parameters by name."""
    hooked = module.named_parameters()
    hooks = {name: list((p._backward_hooks or {}).values()) for name, p in hooked}
    attributes = {name: _users(vars(tensor)) for name, tensor in _registered(module)}
    begun: list[tuple[str, dict, dict]] = []

    def start(called, inputs):
        begun.clear()
        for name, tensor in _registered(called):
            vars(tensor).update(attributes.get(name, {}))
            begun.append((name, vars(tensor), dict(vars(tensor))))
        parameters = dict(called.named_parameters())
        begin(parameters)
        for name, some in hooks.items():
            for hook in some:
                register(parameters[name], hook)

    def end(called, inputs, outputs):
        for name, now, before in begun:
            for key in now.keys() | before.keys():
                if now.get(key, begun) is not before.get(key, begun):
                    where = name.removeprefix("wrapped_module.")
                    raise NotImplementedError(f"forward changes an attribute of a tensor: {where}.{key}")

    handles = module.register_forward_pre_hook(start), module.register_forward_hook(end)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _users(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a tensor that are not this package's."""
    return {k: v for k, v in attributes.items() if not type(v).__module__.startswith("torch_bridge.")}


def _registered(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def unsupported(module: torch.nn.Module) -> Iterator[Obstacle]:
    """Yield hooks for all modules, old-style backward hooks, and hooks that run after backward has written `.grad`."""
    for hook in (*modules._global_forward_hooks.values(), *modules._global_forward_pre_hooks.values()):
        yield Obstacle("a forward hook for all modules (register_module_forward_hook)", code_line(hook))
    for hook in (*modules._global_backward_hooks.values(), *modules._global_backward_pre_hooks.values()):
        yield Obstacle("a backward hook for all modules (register_module_full_backward_hook)", code_line(hook))
    for name, inner in module.named_modules():
        path = name.removeprefix("wrapped_module").removeprefix(".") or type(inner).__name__
        if inner._is_full_backward_hook is False:
            for hook in inner._backward_hooks.values():
                yield Obstacle("a backward hook of torch's old kind (register_backward_hook)", code_line(hook), path)
    for name, parameter in module.named_parameters():
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            what = f"a hook that runs once .grad is written (register_post_accumulate_grad_hook) of {name}"
            yield Obstacle(what.replace("wrapped_module.", ""), code_line(hook))


class Frozen:
    """Tensors on which requires_grad_(False) was called in this forward pass."""

    def __init__(self):
        self._tensors: dict[int, torch.Tensor] = {}

    def ask(self, x: torch.Tensor, wanted: bool) -> torch.Tensor:
        """Replace torch.Tensor.requires_grad_. JAX needs no request for a gradient, but a reentrant checkpoint looks at
        requires_grad."""
        if wanted:
            self._tensors.pop(id(x), None)
            with torch._C.DisableTorchFunction():
                if x.is_leaf and (x.is_floating_point() or x.is_complex()):
                    x.requires_grad_()
        else:
            self._tensors[id(x)] = x
        return x

    def __contains__(self, x: Any) -> bool:
        return id(x) in self._tensors

    def seen(self, arguments: Any) -> Any:
        """Return a call's arguments, with frozen tensors detached."""
        if not self._tensors:
            return arguments
        return pytree.tree_map_only(torch.Tensor, lambda x: x.detach() if x in self else x, arguments)

    def names(self, parameters: dict[str, torch.Tensor]) -> list[str]:
        return [name for name, parameter in parameters.items() if parameter in self]


def check_frozen(program: torch.export.ExportedProgram, names: list[str]) -> None:
    """Raise NotImplementedError if forward leaves a parameter frozen that it used with a gradient before."""
    of = {name: node for node, name in program.graph_signature.inputs_to_parameters.items()}
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for name in names:
        used = [user for user in nodes[of[name]].users if user.target is not torch.ops.aten.detach.default]
        if used:
            shown = name.removeprefix("wrapped_module.")
            raise NotImplementedError(
                f"requires_grad_(False) leaves {shown} frozen after the forward pass used it with a gradient, so that "
                "torch's next call differs from this one: freeze it before the first use, or thaw it at the end"
            )
