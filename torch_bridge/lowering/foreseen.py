"""Foresee in seconds what capture would refuse after minutes: code of other libraries and operators without a lowering.

`reached` reads code: it names what a module or loss may call and no graph can hold. `Foreseen` watches one call in
torch and says whether it does call it. Only both together refuse.
"""

import contextlib
import dis
import functools
import inspect
import linecache
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from torch_bridge.lowering.operators import TABLE

MANY = 100  # submodules from which on a capture takes longer than this look
_MOST_CODE = 5000  # functions that are read
_FOLLOWED = {"torch", "numpy", "jax", "jaxlib", "torch_bridge", "jaxtrain", *sys.stdlib_module_names}
_COMPILED = (types.BuiltinFunctionType, types.MethodDescriptorType)
_FUNCTIONS = {"builtin_function_or_method", "cython_function_or_method", "fused_cython_function"}
_CONVERSIONS = {"numpy", "__array__"}
_ASKS = {"is_compiling", "is_dynamo_compiling", "is_exporting", "is_torchdynamo_compiling", "is_scripting_or_tracing"}


def reached(functions: Iterable[Any], modules: Iterable[torch.nn.Module]) -> bool:
    """Return True if the code of these functions and modules names a compiled function of another library than torch
    and numpy, or an operator without a lowering. Reads code and calls nothing."""
    return _Reader().reads([*functions, *_forwards(modules)])


def _forwards(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[Any, Any]]:
    seen = set()
    for module in modules:
        own = vars(module).get("forward")
        if own is not None:
            yield own, module
        settings = tuple(value for value in vars(module).values() if isinstance(value, str))
        if (type(module), settings) not in seen:
            seen.add((type(module), settings))
            yield type(module).forward, module


class _Reader:
    """Reads functions, and those that they name. Attributes are looked up in the object whose method is read."""

    def __init__(self) -> None:
        self._seen: set[Any] = set()
        self._waiting: list[tuple[Any, Any]] = []

    def reads(self, values: Iterable[Any]) -> bool:
        self._waiting = [value if isinstance(value, tuple) else (value, None) for value in values]
        while self._waiting and len(self._seen) < _MOST_CODE:
            if self._read(*self._waiting.pop()):
                return True
        return False

    def _read(self, value: Any, owner: Any) -> bool:
        """Read one value; return True if it is foreign."""
        key = id(value), type(owner)
        if key in self._seen:
            return False
        self._seen.add(key)
        if isinstance(value, types.MethodType):
            self._waiting.append((value.__func__, value.__self__))
        elif isinstance(value, staticmethod | classmethod):
            self._waiting.append((value.__func__, owner))
        elif isinstance(value, functools.partial):
            self._waiting.append((value.func, owner))
        elif isinstance(value, property):
            self._waiting.append((value.fget, owner))
        elif isinstance(value, types.FunctionType):
            return self._read_function(value, owner)
        elif isinstance(value, type):
            if not _is_followed(value):
                self._read_class(value, owner)
        elif is_foreign(value) or is_without_lowering(value):
            return True
        elif isinstance(value, dict):
            named = (
                {item for item in vars(owner).values() if isinstance(item, str)} if hasattr(owner, "__dict__") else ()
            )
            self._waiting += [(value[name], owner) for name in named if name in value]
        elif isinstance(value, list | tuple):
            self._waiting += [(item, owner) for item in value[:50] if callable(item)]
        elif callable(value) and not _is_followed(type(value)):
            self._read_class(type(value), value)
        return False

    def _read_class(self, kind: type, owner: Any) -> None:
        names = ("__init__", "forward") if issubclass(kind, torch.nn.Module) else ("__init__", "__call__", "forward")
        for name in names:
            member = inspect.getattr_static(kind, name, None)
            if isinstance(member, types.FunctionType):
                self._waiting.append((member, owner if isinstance(owner, kind) else kind))

    def _read_function(self, function: types.FunctionType, owner: Any) -> bool:
        if function.__module__ and function.__module__.partition(".")[0] in _FOLLOWED - {"torch"}:
            return False
        if function.__module__ and function.__module__.startswith("torch.") and not function.__closure__:
            return False
        self._waiting += [(cell.cell_contents, owner) for cell in function.__closure__ or () if _is_filled(cell)]
        self._waiting.append((getattr(function, "__wrapped__", None), owner))
        if function.__module__ and function.__module__.startswith("torch."):
            return False  # a decorator of torch's: what it wraps is in its cells
        codes = [function.__code__]
        while codes:
            code = codes.pop()
            codes += [value for value in code.co_consts if isinstance(value, types.CodeType)]
            if any(map(is_without_lowering, _operators(code, function.__globals__))):
                return True
            self._waiting += [(value, owner) for value in _named(code, function.__globals__, owner)]
        return False


def _named(code: types.CodeType, names: dict[str, Any], owner: Any) -> Iterator[Any]:
    """Yield the values that code names: globals, members of modules and classes among them, attributes of `owner`."""
    holders = [value for name in code.co_names if isinstance(value := names.get(name), types.ModuleType | type)]
    holders = [value for value in holders if not _is_followed(value)]
    for name in code.co_names:
        if name in names:
            yield names[name]
        for holder in holders:
            yield vars(holder).get(name)
        if owner is not None:
            kind = owner if isinstance(owner, type) else type(owner)
            yield inspect.getattr_static(kind, name, None)
            if not isinstance(owner, type) and hasattr(owner, "__dict__"):
                yield vars(owner).get(name)


def _operators(code: types.CodeType, names: dict[str, Any]) -> Iterator[Any]:
    """Yield the operators that code names as torch.ops.library.operator."""
    if "ops" not in code.co_names:
        return
    chain: list[str] = []
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            chain = [step.argval] if names.get(step.argval) is torch else []
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain.append(step.argval)
            if len(chain) == 4 and chain[1] == "ops":
                with contextlib.suppress(AttributeError, RuntimeError):  # torch has no operator of this name
                    yield getattr(getattr(torch.ops, chain[2]), chain[3])


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _package(value: Any) -> str:
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return name.partition(".")[0] if isinstance(name, str) else ""


def _is_followed(value: Any) -> bool:
    """Return True for what torch, numpy and Python's own library define."""
    return _package(value) in _FOLLOWED


def is_foreign(value: Any) -> bool:
    """Return True for a compiled function of another library than torch, numpy, JAX and Python's own."""
    if type(value).__name__ not in _FUNCTIONS or isinstance(value, types.MethodType):
        return False
    package = _package(value)
    return bool(package) and package not in _FOLLOWED


def is_without_lowering(value: Any) -> bool:
    """Return True for an operator of a library of operators that JAX has no form for and torch does not take apart."""
    if isinstance(value, torch._ops.OpOverloadPacket):
        return any(is_without_lowering(getattr(value, name)) for name in value.overloads()[:1])
    if not isinstance(value, torch._ops.OpOverload) or value.namespace in ("aten", "prim", "prims"):
        return False
    return str(value) not in TABLE and not _has_rule(value)


@functools.cache
def _has_rule(operator: Any) -> bool:
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return operator.has_kernel_for_dispatch_key(composite) or operator in torch._decomp.decomposition_table


class Look:
    """Watches a call in torch. refusal: what it does that no graph can hold, with the line; "" for nothing."""

    def __init__(self) -> None:
        self.refusal = ""
        self.line = ""

    @contextlib.contextmanager
    def watching(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """While active, watch. tensors: parameters and the batch, whose values a graph does not know."""
        with _Conversions(self, tensors), _Operators(self):
            yield

    def note(self, what: str, frames: list[types.FrameType]) -> None:
        if frames and not (self.refusal or any(_ASKS & {*frame.f_code.co_names} for frame in frames)):
            code, line = frames[0].f_code, frames[0].f_lineno
            source = linecache.getline(code.co_filename, line).strip()
            self.refusal, self.line = what, f"{code.co_filename}:{line}  {source}"


class _Operators(TorchDispatchMode):
    """Notes operators without a lowering."""

    def __init__(self, look: Look):
        super().__init__()
        self._look = look

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_without_lowering(function) and any(map(torch.is_tensor, pytree.tree_leaves((args, kwargs)))):
            self._look.note(f"{function} has no lowering", _frames())
        return function(*args, **kwargs)


class _Conversions(TorchFunctionMode):
    """Notes numbers of the call that code of another library gets."""

    def __init__(self, look: Look, tensors: Iterable[torch.Tensor]):
        super().__init__()
        self._look, self._computed = look, WeakIdKeyDictionary()
        self._computed.update(dict.fromkeys(tensors, True))

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(tensor in self._computed for tensor in given):
            frames = _frames() if getattr(function, "__name__", "") in _CONVERSIONS else []
            if name := _foreign_name(frames):
                self._look.note(f"{name} computes with values that only the program has", frames)
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._computed[leaf] = True
        return result


def _foreign_name(frames: list[types.FrameType]) -> str:
    """Name a compiled function of another library that the innermost frame's code names; "" for none."""
    named = _named(frames[0].f_code, frames[0].f_globals, None) if frames else ()
    return next((f"{_package(value)}'s {value.__name__}" for value in named if is_foreign(value)), "")


def _frames() -> list[types.FrameType]:
    """Return the frames of code of others than torch that are running, the innermost first."""
    frames, frame = [], sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _FOLLOWED:
            frames.append(frame)
        frame = frame.f_back
    return frames
