"""Backward hooks of modules while Dynamo captures: each call of such a module marks its inputs and its outputs.

Dynamo does not capture torch's own machinery of these hooks. Where the marks are run again, under torch's autograd,
they are that machinery.
"""

import contextlib
import linecache
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules import module as of_all_modules
from torch.utils.hooks import BackwardHook

from torch_bridge.capture.replay import nodes_of
from torch_bridge.lowering.errors import CannotRecord, Obstacle, code_line


def refused_hooks(module: torch.nn.Module) -> Iterator[Obstacle]:
    """Yield hooks for all modules, old-style backward hooks, and hooks that run after backward has written `.grad`."""
    for hook in (*of_all_modules._global_forward_hooks.values(), *of_all_modules._global_forward_pre_hooks.values()):
        yield Obstacle("a forward hook for all modules (register_module_forward_hook)", code_line(hook))
    for hook in (*of_all_modules._global_backward_hooks.values(), *of_all_modules._global_backward_pre_hooks.values()):
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


@contextlib.contextmanager
def marked_hooks(entry: torch.nn.Module) -> Iterator[None]:
    """Inside the context, mark the calls of modules with backward hooks, and take these hooks out."""
    with contextlib.ExitStack() as stack:
        for module in entry.modules():
            if module._backward_hooks or module._backward_pre_hooks:
                stack.enter_context(_marked(module))
        yield


@contextlib.contextmanager
def _marked(module: torch.nn.Module) -> Iterator[None]:
    hooks = module._backward_hooks, module._backward_pre_hooks
    number = len(_running)
    _running[number] = _Hooks(module, *(tuple(map(_answering, each.values())) for each in hooks))
    before = module.register_forward_pre_hook(lambda _, inputs: _inputs(number, *inputs))
    after = module.register_forward_hook(
        lambda _, inputs, output: _outputs(number, *output) if isinstance(output, tuple) else _output(number, output)
    )
    module._backward_hooks, module._backward_pre_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        module._backward_hooks, module._backward_pre_hooks = hooks
        before.remove()
        after.remove()
        del _running[number]


class _Hooks:
    """The backward hooks of a module, and what torch keeps of its present call."""

    def __init__(self, module: torch.nn.Module, hooks: tuple, pre_hooks: tuple):
        self.module, self._hooks, self._pre_hooks = module, hooks, pre_hooks
        self.call: Any = None

    def begin(self) -> Any:
        self.call = BackwardHook(self.module, self._hooks, self._pre_hooks)
        return self.call


_running: dict[int, _Hooks] = {}


@torch.compiler.allow_in_graph
def _inputs(number: int, *inputs: Any) -> Any:
    return _running[number].begin().setup_input_hook(inputs)


@torch.compiler.allow_in_graph
def _outputs(number: int, *outputs: Any) -> Any:
    return _running[number].call.setup_output_hook(outputs)


@torch.compiler.allow_in_graph
def _output(number: int, output: Any) -> Any:
    return _running[number].call.setup_output_hook(output)


def has_module_hooks(gm: torch.fx.GraphModule) -> bool:
    """Return True if the graph has marks of modules with backward hooks."""
    return any(node.target in (_inputs, _outputs, _output) for node in nodes_of(gm))


def _answering(hook: Callable) -> Callable:
    """Return the hook, which raises CannotRecord if it returns nothing for a gradient: what it does in Python would be
    done once."""

    def call(module: torch.nn.Module, *slopes: tuple) -> Any:
        result = hook(module, *slopes)
        if result is None and any(slope is not None for slope in slopes[0]):
            code = getattr(hook, "__code__", None)
            line = f", at {code.co_filename}:{code.co_firstlineno}" if code else ""
            source = f"  {linecache.getline(code.co_filename, code.co_firstlineno).strip()}" if code else ""
            raise CannotRecord(f"a backward hook returns nothing{line}{source}: return the gradient that goes on")
        return result

    return call
