"""Dynamo's graph run again while torch's autograd is traced, with what its higher-order operators leave out.

Dynamo writes torch.utils.checkpoint and an autograd.Function as operators that hold graphs. Traced as they are, a
checkpoint would run once, where torch runs it twice, and a Function's backward would have no derivative.
"""

import builtins
import contextlib
import itertools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_bridge.capture import torch_api
from torch_bridge.capture.attention import AsOne
from torch_bridge.lowering.equal_masks import EqualMasks
from torch_bridge.lowering.errors import CannotRecord, StaysInTorch, source_place

_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
_FUNCTION = torch.ops.higher_order.autograd_function_apply
_STATISTICS = "batch_norm", "instance_norm"
_DRAWS = "dropout", "rand", "bernoulli", "multinomial", "normal_", "uniform_", "rrelu"


class Replay(torch.fx.Interpreter):
    """Run a graph of Dynamo's. A checkpointed part runs again in the backward pass, after the gradients of its results
    are known, and draws the random numbers of its first run: its nodes carry the mark that `Call.draw` reads.

    mode: calls torch's functions, with the user's line as the caller, so that Python shows their warnings with it, by
    the user's filters. warns: show them; Dynamo has run the functions before, and they may run again.
    """

    def __init__(self, gm: torch.fx.GraphModule, mode: AsOne | None = None, warns: bool = False):
        super().__init__(gm)
        self._mode, self._warns, self._masks = mode, warns, EqualMasks()

    def run_node(self, node: torch.fx.Node) -> Any:
        if self._mode is not None:
            self._mode.call = _caller(source_place(node.stack_trace) if self._warns else None)
        return super().run_node(node)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not _CHECKPOINT or _has_rules(kwargs) or torch.is_inference_mode_enabled():
            return self._with_known_masks(super().call_function, target, args, kwargs)
        body, *inputs = args
        outputs = _Twice.apply(_Part(body, inputs), *inputs)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._with_known_masks(super().call_method, target, args, kwargs)

    def _with_known_masks(self, call: Callable, target: Any, args: Any, kwargs: Any) -> Any:
        result = call(target, self._masks.joined(target, args), kwargs)
        self._masks.note(target, args, kwargs, result)
        return result


_SILENT = {"__name__": torch_api.SILENT, "__builtins__": builtins}  # its warnings are ignored
_globals: dict[str, dict[str, Any]] = {}  # by file: they hold Python's register of the warnings already shown


def _caller(place: tuple[str, int] | None) -> Callable:
    """Return a function of (function, args, kwargs) that calls it, at this line as Python sees it."""
    call = lambda function, args, kwargs: function(*args, **kwargs)
    if place is None:
        return types.FunctionType(call.__code__, _SILENT)
    file, line = place
    if file not in _globals:
        loaded = [name for name, module in list(sys.modules.items()) if getattr(module, "__file__", None) == file]
        _globals[file] = {"__name__": loaded[0] if loaded else "__main__", "__builtins__": builtins}
    return types.FunctionType(call.__code__.replace(co_filename=file, co_firstlineno=line), _globals[file])


class _Part:
    """A checkpointed graph. Each run marks the nodes that it traces, so that both draw the same random numbers."""

    numbers = itertools.count()

    def __init__(self, body: torch.fx.GraphModule, inputs: Sequence[Any]):
        self.body, self.number, self.runs = body, next(self.numbers), 0
        kinds = {value.device.type for value in inputs if isinstance(value, Tensor)}
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in sorted(kinds)
            if torch.amp.is_autocast_available(kind)
        ]

    def __call__(self, inputs: Sequence[Any]) -> tuple:
        self.runs += 1
        for node in nodes_of(self.body):
            node.meta["custom"] = {**node.meta.get("custom", {}), "draw": (self.number, node.name, self.runs)}
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            stack.enter_context(torch.fx.traceback.preserve_node_meta())
            outputs = Replay(self.body).run(*inputs)
        return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


class _Twice(torch.autograd.Function):
    """A part whose activations are not kept: the backward pass computes them again."""

    @staticmethod
    def forward(ctx, part: _Part, *inputs: Any):
        ctx.part, ctx.inputs = part, inputs
        return part(inputs)

    @staticmethod
    def backward(ctx, *slopes: Any):
        tensors = [value for value in ctx.inputs if isinstance(value, Tensor)]
        known = [slope for slope in slopes if isinstance(slope, Tensor)]
        feed = iter(after([value.detach() for value in tensors], known)) if known else iter(tensors)
        inputs = list(ctx.inputs)
        for place, value in enumerate(inputs):
            if isinstance(value, Tensor):
                later = next(feed)
                inputs[place] = later.requires_grad_() if ctx.needs_input_grad[place + 1] else value
        with torch.enable_grad():
            outputs = ctx.part(inputs)
        leaves = [value for place, value in enumerate(inputs) if ctx.needs_input_grad[place + 1]]
        pairs = zip(outputs, slopes, strict=True)
        reached = [(y, slope) for y, slope in pairs if getattr(y, "requires_grad", False) and slope is not None]
        if not reached:
            return (None,) * (1 + len(inputs))
        ys, known = map(list, zip(*reached, strict=True))
        gradients = iter(torch.autograd.grad(ys, leaves, known, allow_unused=True))
        return None, *(next(gradients) if needed else None for needed in ctx.needs_input_grad[1:])


@torch.library.custom_op("torch_bridge::after", mutates_args=())
def after(values: list[Tensor], known: list[Tensor]) -> list[Tensor]:
    """Return the values, as they are; whatever is computed of them is computed once `known` is there."""
    return [value.clone() for value in values]


@after.register_fake
def _(values, known):
    return [torch.empty_like(value) for value in values]


def check_backward(gm: torch.fx.GraphModule) -> None:
    """Raise CannotRecord or StaysInTorch for a graph whose numbers or backward pass would not be torch's."""
    if any(name_of(node) == "multilabel_margin_loss" for node in nodes_of(gm)):
        raise StaysInTorch(
            "torch's graph of multilabel_margin_loss counts the classes behind a -1, which torch does not"
        )
    _check_statistics(gm)
    _check_windows(gm)
    twice = any(node.kwargs.get("create_graph") for node in nodes_of(gm) if node.target is torch.autograd.grad)
    for inner in gm.modules():
        for node in inner.graph.nodes if isinstance(inner, torch.fx.GraphModule) else ():
            if node.target is _FUNCTION and twice:
                raise CannotRecord("it differentiates the backward of an autograd.Function")
            if node.target is _CHECKPOINT:
                _check_checkpoint(node, getattr(inner, node.args[0].target), twice)


def check_values(gm: torch.fx.GraphModule) -> None:
    """Raise StaysInTorch for a function that torch's own capture takes apart into another one."""
    if any(name_of(node) == "multilabel_margin_loss" for node in nodes_of(gm)):
        raise StaysInTorch("torch's graph of multilabel_margin_loss counts classes behind a -1, where torch's ends")


def _check_statistics(gm: torch.fx.GraphModule) -> None:
    """Raise StaysInTorch for a BatchNorm that evaluates and then writes its statistics: torch's kernel keeps no copy of
    those that it normalised with, and its backward pass reads the later ones."""
    read: set[torch.fx.Node] = set()
    for node in gm.graph.nodes:
        if name_of(node) != "batch_norm":
            continue
        arguments = dict(
            zip(("input", "running_mean", "running_var", "weight", "bias", "training"), node.args, strict=False)
        )
        arguments |= node.kwargs
        mean, training = arguments.get("running_mean"), arguments.get("training", False)
        if training and mean in read:
            raise StaysInTorch(
                "a BatchNorm runs in eval() and then in train() before one backward pass, whose gradients torch "
                "computes with the statistics that the second call has written"
            )
        if mean is not None and not training and node.meta["example_value"].requires_grad:
            read.add(mean)


def _check_windows(gm: torch.fx.GraphModule) -> None:
    """Raise CannotRecord for a write to the windows of unfold(), which share memory: a functional graph of torch's then
    has zeros outside of them."""
    windows: set[torch.fx.Node] = set()
    for node in nodes_of(gm):
        source = node.args[0] if node.args else None
        if source in windows and writes(node):
            raise CannotRecord("it writes through unfold(), whose windows share memory")
        if name_of(node) == "unfold" or (source in windows and node.op in ("call_method", "call_function")):
            windows.add(node)


def _check_checkpoint(node: torch.fx.Node, body: torch.fx.GraphModule, twice: bool) -> None:
    options, computed = node.kwargs, [each for each in node.all_input_nodes if each.op.startswith("call_")]
    if options.get("use_reentrant") and not any(getattr(_value(x), "requires_grad", False) for x in computed):
        raise CannotRecord(
            "it calls checkpoint(use_reentrant=True) on inputs without a gradient, and torch trains none"
        )
    if twice:
        raise CannotRecord("it differentiates the backward of a checkpointed part")
    if options.get("preserve_rng_state") is False and any(map(_draws, nodes_of(body))):
        raise CannotRecord("a checkpoint with preserve_rng_state=False draws other random numbers in its second run")
    writing = [node for node in nodes_of(body) if writes(node)]
    if writing and _has_rules(options):
        raise CannotRecord("a checkpoint with a context_fn writes to tensors")
    if writing and "norm" not in name_of(writing[-1]):  # torch ends the second run where nothing more is needed
        raise CannotRecord("a checkpointed part writes to tensors")


def _value(node: torch.fx.Node) -> Any:
    return node.meta.get("example_value")


def writes_in_checkpoint(gm: torch.fx.GraphModule) -> bool:
    """Return True if a checkpointed part writes to tensors, as BatchNorm counts: torch runs it twice, AOTAutograd does
    not."""
    for inner in gm.modules():
        for node in inner.graph.nodes if isinstance(inner, torch.fx.GraphModule) else ():
            if node.target is _CHECKPOINT and any(map(writes, nodes_of(getattr(inner, node.args[0].target)))):
                return True
    return False


def _has_rules(options: dict) -> bool:
    return options.get("context_fn") is not None


def nodes_of(gm: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """Yield the nodes of a graph and of those that its operators hold."""
    for inner in gm.modules():
        if isinstance(inner, torch.fx.GraphModule):
            yield from inner.graph.nodes


def name_of(node: torch.fx.Node) -> str:
    """Return the name of the function or method that a node calls; "" for an operator's object without one."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def writes(node: torch.fx.Node) -> bool:
    """Return True for an operator that may write to its arguments."""
    if node.op not in ("call_method", "call_function"):
        return False
    name = name_of(node)
    return (name.endswith("_") and not name.endswith("__")) or name in ("setitem", *_STATISTICS) or "out" in node.kwargs


def _draws(node: torch.fx.Node) -> bool:
    return any(word in name_of(node) for word in _DRAWS)
