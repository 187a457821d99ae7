"""Torch code compiled by JAX, called from a torch program. Outputs are tensors in torch's autograd graph.

    call = CompiledCall(module, lambda module, batch: loss_fn(module(batch["x"]), batch["y"]))
    loss = call(batch)
    loss.backward()                 # fills the parameters' grad
    optimizer.step()

Operations on the loss before backward(), and on the gradients before the update, stay in torch.
"""

import contextlib
import copy
import inspect
import logging
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import torch
import torch.utils.checkpoint
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from jaxtrain.errors import UserError
from jaxtrain.runtime import compile_cache, gpus
from jaxtrain.runtime.waits import PATIENCE_S, PATIENCE_STEPS, Waits
from torch_bridge.call_program import CallProgram
from torch_bridge.datasets import to_numpy
from torch_bridge.exchange import check_input
from torch_bridge.from_torch import unwrapped
from torch_bridge.lowering.errors import (
    CannotRecord,
    MayRaise,
    RunsOnceInTorch,
    StaysInTorch,
    TooManyRecords,
    line_in,
    stays_in_torch,
    unreadable,
)
from torch_bridge.lowering.interpreter import Graph
from torch_bridge.lowering.python.changing import forms
from torch_bridge.lowering.recording.batch_items import BatchItems
from torch_bridge.lowering.recording.hooks import differ_twice
from torch_bridge.lowering.recording.objects import take_apart
from torch_bridge.lowering.structure import WithLeft, is_cache
from torch_bridge.modes import watching
from torch_bridge.module_tensors import snapshot
from torch_bridge.refusals import Refusals
from torch_bridge.step_record import RECORDING, Inside, LossRecord, fails_in_torch, flags_of, reason_of
from torch_bridge.torch_edits import structure_of

BACKWARD = 2  # the time of a backward pass in torch, as a multiple of the forward pass's
TOLD_SHAPES, MOST_SHAPES = 8, 64  # input shapes of a module: number to warn at, most to compile for
MOST_STRUCTURES = 8  # variants of modules, hooks or tied weights; each has its own records
IN_TORCH = Inside()  # inside this context nothing runs compiled

log = logging.getLogger(__name__)


class CompiledCall:
    """Call `function(*modules, batch)`, compiled, with the modules' parameters as they are at each call.

    gives_up: raise RunsOnceInTorch for a call of which torch's time is wanted, in `torch_s`, and StaysInTorch where
    compiling has cost more than torch would.

    module: a torch module, or several by name. function: torch code that returns tensors in any nesting. Outputs are
    differentiable where they are in torch. Parameters that no output depends on get no gradient. Buffers that the call
    changes are written back. Train/eval modes and requires_grad are read at each call; random numbers follow
    torch.manual_seed.
    """

    def __init__(
        self, module: torch.nn.Module | Mapping[str, torch.nn.Module], function: Callable, gives_up: bool = False
    ):
        gpus.share_memory()
        compile_cache.enable()
        modules = module if isinstance(module, Mapping) else {"module": module}
        self.modules = {name: unwrapped(inner) for name, inner in modules.items()}
        self._function = function
        name = type(next(iter(self.modules.values()))).__name__
        self._items, self._waits = BatchItems(name), Waits(name, line_in)
        self._structures: dict[tuple, tuple] = {}
        self._structure: tuple | None = None
        self._gives_up, self._calls = gives_up, 0
        self.torch_s: float | None = None

    def __call__(self, batch: Any) -> Any:
        """Run the compiled function. Raises UserError listing what cannot be recorded, with line numbers."""
        before = torch.get_rng_state()
        try:
            outputs = self._run(batch)
        except Exception as error:
            torch.set_rng_state(before)  # torch may run the call instead, and draws what it draws
            recordable = isinstance(error, RunsOnceInTorch)
            if isinstance(error, CannotRecord) and not recordable and self._items.give_up(error):
                return self(batch)
            raise
        self._calls += 1
        self._items.recorded()
        return outputs

    def _run(self, batch: Any) -> Any:
        try:
            inputs = take_apart(batch)
            for leaf in pytree.tree_leaves(inputs):
                check_input(leaf)
        except UserError:
            raise
        except Exception as error:
            raise unreadable("its arguments", None, error) from error
        leaves, spec = pytree.tree_flatten((self._items.follow(inputs),))
        own = type(batch) if isinstance(batch, Mapping) and type(batch) is not dict else None
        inside = [inner for module in self.modules.values() for inner in module.modules()]
        tensors, aliases = snapshot(self.modules)
        self._follow((structure_of(inside, parameter_hooks=False), tuple(tensors), tuple(aliases.items())))
        self.record.check_captured()
        modes = flags_of(inside)
        hooked = any(inner._backward_hooks or inner._backward_pre_hooks for inner in inside)
        moved = any(getattr(leaf, "requires_grad", False) for leaf in leaves)
        if hooked and moved:
            raise CannotRecord("a module with backward hooks is inside, and an input requires a gradient")
        graph, numbers = self._graph(leaves, spec, modes, own)
        if self.record.left:
            raise CannotRecord(f"it changes {', '.join(sorted(self.record.left)[:3])} in Python")
        python = graph.host.values([*leaves, *numbers])
        leaves = graph.host.given([*leaves, *numbers])
        tensors |= {alias: tensors[name] for alias, name in aliases.items()}
        if id(graph) not in self._programs:  # ids stay unique: the record keeps its graphs alive
            if unfit := graph.unfit(leaves, tensors):
                raise CannotRecord(unfit)
            if moved and differ_twice(graph.module):  # a gradient penalty is likely
                raise CannotRecord("a backward hook is inside, and an input requires a gradient")
            self._programs[id(graph)] = CallProgram(graph, self._waits)
        program = self._programs[id(graph)]
        graph.check_indices(leaves)
        reached = program.reached
        state = {name: tensors[name] if name in reached else tensors[name].detach() for name in graph.state}
        state |= {name: state[name].clone() for name in graph.changed if name in state}  # overwritten below
        trained = {name for name, tensor in state.items() if tensor.requires_grad}
        trained |= {name for name, leaf in zip(graph.inputs, leaves, strict=True) if getattr(leaf, "requires_grad", 0)}
        outputs, changed = program(state, leaves, frozenset(trained), {**tensors, **python})
        if graph.may_raise and not all(map(_is_finite, pytree.tree_leaves((outputs, changed)))):
            raise MayRaise(graph.may_raise)
        with torch.no_grad():
            for name, value in changed.items():
                tensors[name].copy_(value)
        if isinstance(outputs, WithLeft):
            self.record.left_tensors[id(graph)].leave(outputs.tensors)
            return outputs.outputs
        return outputs

    def _follow(self, structure: tuple) -> None:
        """Select the records for these modules, hooks and tied weights; start new ones for a structure not seen
        before."""
        if structure == self._structure:
            return
        if structure not in self._structures:
            if len(self._structures) == MOST_STRUCTURES:
                raise TooManyRecords(f"its modules or their hooks have changed {MOST_STRUCTURES} times")
            self._structures[structure] = LossRecord(self.modules, self._function, torch_backward=True), {}, {}
        self._structure = structure
        self.record, self._programs, self._graphs = self._structures[structure]

    def _graph(self, leaves: list, spec: Any, modes: tuple, own: type | None) -> tuple[Graph, list]:
        """Return the graph for these inputs, from the cache if possible, and the Python numbers that it takes as
        inputs."""
        given = [_form(leaf) for leaf in leaves]
        python, numbers = self.record.python()
        key = spec, modes, own, forms(given)
        for graph in self._graphs.get((python, key), ()):
            if graph.host.answers([*given, *numbers]):
                return graph, numbers
        self._items.check()
        self._compare_costs()
        with self._waits.during("is recorded"):
            graph, numbers = self.record.graph(given, spec, modes, own)
        self._graphs.setdefault((self.record.python()[0], key), []).append(graph)
        return graph, numbers

    def _compare_costs(self) -> None:
        """Raise StaysInTorch if compiling has cost more than torch would, and RunsOnceInTorch to get torch's time."""
        spent_s = self._waits.spent_s
        if not self._gives_up or spent_s < PATIENCE_S:
            return
        if self.torch_s is None:
            raise RunsOnceInTorch(f"compiling has taken {spent_s:.0f} s, and a call in torch is timed")
        step_s = self.torch_s * (1 + BACKWARD)
        if self._waits.cost_more(step_s, self._calls):
            raise StaysInTorch(
                f"compiling has taken {spent_s:.0f} s, more than {PATIENCE_STEPS} forward and backward passes in torch "
                f"would ({step_s:.2g} s each), and this call needs another program"
            )


class CompiledForward:
    """Replacement for a module's `forward`: `module.forward = CompiledForward(module)`.

    own: a forward that was set on the module itself rather than on its class. A copy of the module gets its own
    CompiledForward; a pickle gets the plain forward. The plain forward runs while the module is recorded as part of
    another, and inside torch.compile, torch.func, torch.jit and torch.utils.checkpoint. A call that cannot be recorded,
    or that changes Python attributes, runs in torch. If the next one cannot be recorded either, torch runs all later
    ones around the compiled parts, and a warning says why.
    """

    def __init__(self, module: torch.nn.Module, own: Callable | None = None):
        self.__self__, self._own = module, own
        self.__name__ = "forward"
        self.__signature__ = inspect.signature(self.__wrapped__)
        self._call: CompiledCall | None = None
        self._shapes: set[tuple] = set()
        self._told: set[str] = set()
        self._refusals = Refusals()
        self._apart = self._whole = False  # torch runs this forward; its parts run compiled, or in torch too

    @property
    def __wrapped__(self) -> Callable:  # read at each call: recording temporarily replaces forwards of torch's classes
        return self._own or type(self.__self__).forward.__get__(self.__self__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._whole:
            with IN_TORCH:
                return self.__wrapped__(*args, **kwargs)
        if self._apart or IN_TORCH.active or RECORDING.active or _traced() or _recomputed(sys._getframe(1)):
            return self.__wrapped__(*args, **kwargs)
        if kwargs.get("use_cache") is True or any(map(is_cache, pytree.tree_leaves((args, kwargs)))):
            return self._in_torch("it takes a cache of keys and values, or shall give one", args, kwargs)
        if self._too_many((args, kwargs)):
            return self.__wrapped__(*args, **kwargs)
        if self._call is None:
            self._call = CompiledCall(self.__self__, _on_inputs(self._own), gives_up=True)
        try:
            outputs = self._call((args, kwargs))
            self._refusals.recorded()
            return outputs
        except CannotRecord as error:
            refused = error
        if fails_in_torch(refused):
            return self.__wrapped__(*args, **kwargs)  # raises torch's own error
        if isinstance(refused, RunsOnceInTorch):
            began = time.perf_counter()
            outputs = self._in_torch(reason_of(refused), args, kwargs)
            self._call.torch_s = time.perf_counter() - began
            return outputs
        if self._refusals.again(refused):
            self._call = None
            return self._in_torch(f"{reason_of(refused)}; the next is recorded anew", args, kwargs)
        self._apart, self._whole = True, stays_in_torch(refused)
        parts = "with all its parts" if self._whole else "its parts compiled"
        log.warning("%s runs in torch, %s: %s", type(self.__self__).__name__, parts, reason_of(refused))
        for part in () if self._whole else parts_of(self.__self__):
            compile_forward(part)
        return self(*args, **kwargs)

    def _in_torch(self, reason: str, args: tuple, kwargs: dict) -> Any:
        """Run this call and all its parts in torch. Log each reason once."""
        if reason not in self._told:
            self._told.add(reason)
            log.info("a call of %s runs in torch: %s", type(self.__self__).__name__, reason)
        with IN_TORCH:
            return self.__wrapped__(*args, **kwargs)

    def _too_many(self, inputs: Any) -> bool:
        """Record the shapes of a call; return True if they are new and MOST_SHAPES have been compiled already."""
        key = self.__self__.training, tuple(map(_shape_of, pytree.tree_leaves(inputs)))
        if key in self._shapes:
            return False
        name, known = type(self.__self__).__name__, len(self._shapes)
        if known == MOST_SHAPES:
            log.warning("%s has been compiled for %d shapes; further ones run in torch", name, known)
            self._shapes.add(())  # makes the count exceed MOST_SHAPES, so that this is logged once
        if known >= MOST_SHAPES:
            return True
        self._shapes.add(key)
        if known + 1 == TOLD_SHAPES:
            log.warning("%s is compiled for its shape number %d: pad batches to a few lengths", name, known + 1)
        return False

    @property
    def __func__(self) -> "_Unbound":
        """Return the forward as an unbound function, as of a bound method: accelerate rebinds it around autocast."""
        return _Unbound(self.__wrapped__.__func__)

    @property
    def __code__(self) -> types.CodeType:
        return inspect.unwrap(self.__func__).__code__

    def __deepcopy__(self, memo: dict) -> "CompiledForward":
        return CompiledForward(copy.deepcopy(self.__self__, memo), copy.deepcopy(self._own, memo))

    def __reduce__(self):
        return (getattr, (self._own, "__call__")) if self._own else self.__wrapped__.__reduce__()


class _Unbound:
    """A compiled forward as a function of the module and its inputs. Each module has its own programs."""

    def __init__(self, function: Callable):
        self.__wrapped__ = function

    def __call__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        held = vars(module).get("_compiled_forward")
        if held is None:
            held = vars(module)["_compiled_forward"] = CompiledForward(module, self.__wrapped__.__get__(module))
        return held(*args, **kwargs)


def _on_inputs(own: Callable | None) -> Callable:
    """Return the forward as a function of (module, (args, kwargs)). own: a forward set on the module itself."""

    def run(module: torch.nn.Module, inputs: tuple) -> Any:
        args, kwargs = inputs
        return (own or type(module).forward.__get__(module))(*args, **kwargs)

    return run


def _traced() -> bool:
    """Return True inside torch.compile, torch.export, torch.jit, torch.func or forward-mode differentiation, where
    values are not plain tensors, and inside modes that see every operation."""
    inside = torch.compiler.is_compiling() or torch.jit.is_tracing() or forward_ad._current_level >= 0 or watching()
    return bool(inside) or torch._C._functorch.maybe_current_level() is not None


def _recomputed(frame: types.FrameType | None) -> bool:
    """Return True inside torch.utils.checkpoint, where autograd must save the same tensors in the recomputation."""
    while frame is not None and frame.f_code.co_filename != torch.utils.checkpoint.__file__:
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def compiled_forwards(module: torch.nn.Module) -> Iterator[None]:
    """Inside the context, run the module and its parts with parameters compiled wherever torch code calls them."""
    before = {inner for inner in module.modules() if "forward" in vars(inner)}
    for inner in (module, *parts_of(module)):
        compile_forward(inner)
    try:
        yield
    finally:
        for inner in module.modules():
            if inner not in before and isinstance(vars(inner).get("forward"), CompiledForward):
                del inner.forward


def compile_forward(module: torch.nn.Module) -> None:
    """Make the module's forward run compiled from now on. Does nothing if the forward was set on the module itself or
    its class defines none."""
    unset = {torch.nn.Module.forward, *(base.forward for base in type(module).__mro__[1:] if _is_shell(base))}
    if type(module).forward not in unset and "forward" not in vars(module):
        module.forward = CompiledForward(module)


def _is_shell(kind: type) -> bool:
    """Return True for Lightning's module class, whose forward only raises that it is not implemented."""
    return kind.__name__ == "LightningModule"


def parts_of(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the outermost submodules that have parameters and a forward; containers such as ModuleList are descended
    into."""
    for child in module.children():
        if type(child).forward is torch.nn.Module.forward:
            yield from parts_of(child)
        elif any(True for _ in child.parameters()):
            yield child


def _is_finite(leaf: Any) -> bool:
    return not isinstance(leaf, torch.Tensor) or bool(leaf.isfinite().all())


def _shape_of(leaf: Any) -> Any:
    """Return an input's shape; None for what has none, as a nested tensor."""
    return None if isinstance(leaf, torch.Tensor) and leaf.is_nested else getattr(leaf, "shape", None)


def _form(leaf: Any) -> Any:
    """Return the shape and dtype of a tensor, which is all that recording needs; other values as they are."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return jax.ShapeDtypeStruct(tuple(leaf.shape), to_numpy(leaf.new_empty(0, device="cpu")).dtype)
