"""Modules that run compiled wherever torch code calls them: `compile_calls(module)`.

Their outputs are tensors in torch's autograd graph; whatever stands around the call, a loss, hooks, an optimizer, stays
torch's. TorchDynamo captures the module in as many graphs as it has to, and the backend computes them.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from torch_bridge.capture import torch_api
from torch_bridge.capture.backend import jaxtrain as backend
from torch_bridge.capture.replay import check_backward, writes_in_checkpoint
from torch_bridge.capture.unguarded import Unguarded
from torch_bridge.lowering.errors import CannotRecord
from torch_bridge.lowering.structure import is_cache
from torch_bridge.modes import watching

log = logging.getLogger(__name__)


class _Inside(threading.local):
    """Context whose `active` is True while this thread runs code inside it."""

    depth = 0

    @property
    def active(self) -> bool:
        return self.depth > 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


_INSIDE = _Inside()  # a module that runs, compiled or in torch, decides for its parts


class ModuleCall:
    """Call that `module(...)` runs instead of torch's own call.

    torch itself runs a call
    - inside torch.compile, torch.export, torch.jit, torch.func, saved-tensor hooks and modes that see every operation,
      and while there are hooks for all modules;
    - with a cache of keys and values, whose sizes grow from call to call;
    - with an argument that asks for its gradient, as a gradient penalty does: AOTAutograd has no second derivative.
    wait: for each program, instead of computing in torch while XLA compiles it.
    """

    def __init__(self, module: torch.nn.Module, wait: bool = False):
        self._module, self._wait = module, wait
        self._unguarded = Unguarded()
        self._recaptures = False  # a guard has failed: sizes and integers may be symbols
        self._said: set[str] = set()
        self._capture_anew()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises what the module raises in torch."""
        if torch.compiler.is_compiling() or _INSIDE.active or _watched() or torch_api.is_off():
            return self._module._call_impl(*args, **kwargs)
        if why := _stays(pytree.tree_leaves((args, kwargs))):
            return self._in_torch(why, args, kwargs)
        if self._unguarded.changed():
            self._capture_anew()
        try:
            with _INSIDE:
                return self._captured(*args, **kwargs)
        except Exception:
            self._capture_anew()  # Dynamo gives up code that has failed, here for these arguments
            raise

    def _in_torch(self, why: str, args: tuple, kwargs: dict) -> Any:
        if why not in self._said:
            self._said.add(why)
            log.info("a call of %s runs in torch: %s", type(self._module).__name__, why)
        with _INSIDE:
            return self._module._call_impl(*args, **kwargs)

    def _capture_anew(self) -> None:
        self._captured = torch_api.in_pieces(self._module, self._compile, self._note)

    def _note(self, reason: str) -> None:
        self._recaptures = True

    def _compile(self, gm: torch.fx.GraphModule, fakes: Sequence[Any]) -> Callable:
        """Return the program of a graph: a backend of Dynamo's. What Dynamo gets wrong runs in Python."""
        wrong = torch_api.stale() or torch_api.lost_writes() or torch_api.keeps_padding(gm.graph)
        wrong = wrong or torch_api.unguarded_line(self._recaptures)
        if wrong or writes_in_checkpoint(gm):
            torch_api.run_in_python(f"Dynamo does not follow {wrong or 'what a checkpointed part writes'}")
        try:
            check_backward(gm)
        except CannotRecord as error:
            torch_api.run_in_python(str(error))
        self._unguarded.note()
        return backend(gm, fakes, options={"wait": self._wait})


def compile_calls(modules: Iterable[torch.nn.Module], wait: bool = False) -> None:
    """Let these modules run compiled from now on, called as a whole or by their parts. A module that has a call of its
    own, as `module.compile()` sets one, keeps it. wait: as for ModuleCall."""
    for module in modules:
        for inner in (module, *parts_of(module)):
            if torch_api.call_of(inner) is None:
                torch_api.set_call(inner, ModuleCall(inner, wait))


@contextlib.contextmanager
def compiled_calls(module: torch.nn.Module) -> Iterator[None]:
    """Inside the context, let the module run compiled, called as a whole or by its parts."""
    compile_calls([module])
    try:
        yield
    finally:
        leave_calls([module])


def leave_calls(modules: Iterable[torch.nn.Module]) -> None:
    """Let torch run these modules, and their parts, again."""
    for module in modules:
        for inner in module.modules():
            if isinstance(torch_api.call_of(inner), ModuleCall):
                torch_api.set_call(inner, None)


def parts_of(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the outermost submodules that have parameters and a forward; containers such as ModuleList are descended
    into."""
    for child in module.children():
        if type(child).forward is torch.nn.Module.forward:
            yield from parts_of(child)
        elif any(True for _ in child.parameters()):
            yield child


def _stays(leaves: Sequence[Any]) -> str:
    """Return why torch runs a call with these arguments; "" if it need not."""
    for leaf in leaves:
        if is_cache(leaf):
            return "it takes a cache of keys and values"
        if isinstance(leaf, torch.Tensor) and type(leaf) not in (torch.Tensor, torch.nn.Parameter):
            return f"it takes a {type(leaf).__name__}, a tensor class with methods of its own"
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.is_leaf and torch.is_grad_enabled():
            return "an argument asks for its gradient, which may be differentiated again"
    return ""


def _watched() -> bool:
    """Return True inside torch.jit, torch.func or forward-mode differentiation, where values are no plain tensors, and
    while modes or hooks see every operation or module."""
    inside = torch.jit.is_tracing() or forward_ad._current_level >= 0 or watching() or torch_api.has_global_hooks()
    return bool(inside) or torch._C._functorch.maybe_current_level() is not None
