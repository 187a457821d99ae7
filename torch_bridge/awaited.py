"""Tensors whose newest values are elsewhere, such as on the device: the first read or write fetches them.

Until then the tensors have a subclass, as torch's uninitialized parameters do. Its __torch_function__ fetches the
values and restores the class; shapes, gradients and other metadata are answered without a fetch.
"""

import contextlib
import copy
import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from jaxtrain.errors import UserError

plainly = torch._C.DisableTorchFunctionSubclass  # a context that reads these tensors without fetching them

_PROPERTIES = (
    "shape dtype device layout requires_grad grad is_leaf ndim is_cpu is_cuda is_meta is_sparse is_quantized is_nested "
    "_backward_hooks _post_accumulate_grad_hooks retains_grad grad_fn itemsize nbytes _version"
)
_METHODS = (
    "size dim ndimension numel nelement stride element_size is_floating_point is_complex is_contiguous is_signed "
    "requires_grad_ get_device storage_offset register_hook retain_grad __len__"
)
_WITHOUT_VALUES = {getattr(torch.Tensor, name) for name in _METHODS.split()}
_WITHOUT_VALUES |= {getattr(torch.Tensor, name).__get__ for name in _PROPERTIES.split()}
_WITHOUT_VALUES |= {torch.Tensor.requires_grad.__set__, torch.Tensor.grad.__set__, torch.Tensor.grad.__delete__}


class Awaited:
    """Tensors whose values are out of date. fetch: called before the first of them is read or written."""

    def __init__(self, tensors: Iterable[torch.Tensor], fetch: Callable[[], None]):
        self._tensors, self._fetch = list(tensors), fetch
        self._classes: list[type] = []
        self._process = os.getpid()

    def hold(self) -> None:
        """Mark the values as out of date from now on."""
        self._classes = [type(tensor) for tensor in self._tensors]
        for tensor, kind in zip(self._tensors, self._classes, strict=True):
            tensor._awaited = self  # keeps this object alive exactly as long as one of the tensors
            tensor.__class__ = _awaited(kind)

    def release(self) -> None:
        """Mark the values as up to date: restore the tensors' own classes."""
        for tensor, kind in zip(self._tensors, self._classes, strict=False):
            tensor.__class__ = kind
            del tensor._awaited
        self._classes = []

    def replace(self, tensor: torch.Tensor, other: torch.Tensor) -> None:
        """Await the values of another tensor in place of this one, whose own class is restored."""
        place = next(place for place, known in enumerate(self._tensors) if known is tensor)
        self._tensors[place] = other
        if self._classes:
            tensor.__class__ = self._classes[place]
            del tensor._awaited
            self._classes[place] = type(other)
            other._awaited, other.__class__ = self, _awaited(type(other))

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Inside the context, the tensors have their own classes, for code that looks at these and reads no values."""
        for tensor, kind in zip(self._tensors, self._classes, strict=False):
            tensor.__class__ = kind
        try:
            yield
        finally:
            for tensor, kind in zip(self._tensors, self._classes, strict=False):
                tensor.__class__ = _awaited(kind)

    def fetch(self) -> None:
        """Fetch the values; the `fetch` callback must call `release`. Raises UserError in a forked process, which
        cannot use the devices."""
        if os.getpid() != self._process:
            raise UserError(
                "a worker process reads weights that were trained after it was started: call step.sync() before you "
                "start workers that use the module"
            )
        with _disable_current_modes(), torch._C.DisableTorchFunction():  # while another module is recorded, say
            if "torch._dynamo" in sys.modules:  # torch.compile would otherwise compile the fetch too
                undisturbed: Any = torch.compiler.disable
                undisturbed(self._fetch)()
            else:
                self._fetch()


class _Awaited:
    """Mixin put before a tensor's own class while its values are out of date."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if function in _WITHOUT_VALUES:
            with plainly():
                return function(*args, **(kwargs or {}))
        settle(pytree.tree_leaves((args, kwargs)))
        return function(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict) -> Any:
        settle([self])
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        settle([self])
        return self.__reduce_ex__(protocol)


def settle(values: Iterable[Any]) -> None:
    """Fetch the values of all out-of-date tensors among `values`."""
    for value in values:
        if isinstance(value, _Awaited):
            value._awaited.fetch()


@functools.cache
def _awaited(kind: type) -> type:
    return type(kind.__name__, (_Awaited, kind), {"__module__": kind.__module__})


def state_tensors(optimizer: Any) -> list[torch.Tensor]:
    """Return the state tensors of a torch optimizer; an empty list for any other kind of optimizer."""
    entries = getattr(optimizer, "state", {}).values()
    return [value for state in entries for value in state.values() if isinstance(value, torch.Tensor)]


def before_optimizer(optimizer: Any, method: Callable[[], None]) -> None:
    """Call `method` before the optimizer steps and before its state dict is saved or loaded, but not before a step that
    finds no gradients and so changes nothing, as drop-ins' loops make one after each compiled update. Only a weak
    reference to the method's object is kept."""
    weak = weakref.WeakMethod(method)

    def call(*_: Any) -> None:
        found = weak()
        if found is not None:
            found()

    def before_step(stepping: Any, args: tuple, kwargs: dict) -> None:
        closure = len(args) > 1 or kwargs.get("closure") is not None  # args[0] is the optimizer
        if closure or any(p.grad is not None for group in stepping.param_groups for p in group["params"]):
            call()

    for moment, hook in (("state_dict_pre", call), ("load_state_dict_pre", call), ("step_pre", before_step)):
        hook.of_a_compiled_step = True  # type: ignore[attr-defined]  # not a hook of the user's own
        register = getattr(optimizer, f"register_{moment}_hook", None)
        if register is not None:
            with contextlib.suppress(AttributeError):  # a wrapper that never called Optimizer.__init__, as Lookahead
                register(hook)


_TRAINED: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()  # by compiled steps
_THEIRS: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that compiled steps use


def refuse_other_optimizers(tensors: Iterable[torch.Tensor], optimizers: Iterable[Any]) -> None:
    """Make `step()` raise UserError for any optimizer outside `optimizers` that holds some of these tensors and finds
    no gradients: a compiled step leaves none."""
    if not _THEIRS:
        register_optimizer_step_pre_hook(_check_gradients)
    _TRAINED.update((id(tensor), tensor) for tensor in tensors)
    _THEIRS.update(optimizer for optimizer in optimizers if hasattr(optimizer, "param_groups"))


def _check_gradients(optimizer: Any, args: tuple, kwargs: dict) -> None:
    if optimizer in _THEIRS or len(args) > 1 or kwargs.get("closure") is not None:  # args[0] is the optimizer
        return
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(_TRAINED.get(id(p)) is p for p in held) and all(p.grad is None for p in held):
        raise UserError(
            f"{type(optimizer).__name__}.step() finds no gradients: a compiled step of these parameters has been given "
            "another optimizer, and computes gradients for that alone. Give it both, jaxtrain.compile(module, loss, "
            "[optimizer, other]), and remove other.step()"
        )
