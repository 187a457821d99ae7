"""Find the names that a function's code reads, and tell user code from library code."""

import dis
import functools
import inspect
import itertools
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

_ASIDE = set(
    "__init__ __new__ __del__ __repr__ __str__ __format__ __reduce__ __reduce_ex__ __getstate__ __setstate__ "
    "__copy__ __deepcopy__ __dir__ __sizeof__ __init_subclass__ __class_getitem__ __subclasshook__ __setattr__ "
    "__delattr__".split()
)
_AT_FIRST = ("__init__", "extra_repr", "__repr__", "reset_parameters")
OWN_STATE = set("jaxtrain torch_bridge logging torch transformers accelerate lightning pytorch_lightning".split())
_LIBRARIES = (os.path.dirname(os.__file__), "<frozen ", "site-packages", f"{os.sep}torch_bridge{os.sep}")


_KNOWN_CODE = 1 << 14  # functions whose names are remembered


@functools.lru_cache(maxsize=_KNOWN_CODE)
def names_of(code: types.CodeType) -> frozenset[str]:
    """Return the names in the code and in functions inside it, and strings that may be names: getattr(args, "lam")."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    texts = frozenset(const for const in code.co_consts if isinstance(const, str) and const.isidentifier())
    return texts.union(code.co_names, *map(names_of, inner))


@functools.lru_cache(maxsize=_KNOWN_CODE)
def states_read(code: types.CodeType) -> frozenset[str]:
    """Return "NAME.state" for every name whose attribute `state` is read by the code, or a function inside it."""
    own = frozenset[str]()
    if "state" in code.co_names:
        loads = [str(instruction.argval) for instruction in dis.get_instructions(code)]
        own = frozenset(f"{name}.state" for name, attribute in itertools.pairwise(loads) if attribute == "state")
    return own.union(*(states_read(const) for const in code.co_consts if isinstance(const, types.CodeType)))


@functools.lru_cache(maxsize=_KNOWN_CODE)
def globals_of(code: types.CodeType) -> frozenset[str]:
    """Return the names that the code, or a function inside it, loads from its globals."""
    loads = (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
    own = frozenset(loads if code.co_names else ())
    return own.union(*(globals_of(const) for const in code.co_consts if isinstance(const, types.CodeType)))


def decorated(value: Any) -> list[types.FunctionType]:
    """Return the Python functions that run when a callable, method or property is used: user decorators and what they
    wrap, and the cases of a functools.singledispatch."""
    layers: list[types.FunctionType] = []
    waiting, seen = [value], set[int]()
    while waiting:
        value = waiting.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, property):
            waiting.append(value.fget)
        elif isinstance(value, (functools.cached_property, functools.partial, functools.partialmethod)):
            waiting.append(value.func)
        elif isinstance(value, functools.singledispatchmethod):
            waiting += value.dispatcher.registry.values()
        elif isinstance(value, (types.MethodType, classmethod, staticmethod)):
            waiting.append(value.__func__)
        else:
            plain = isinstance(value, types.FunctionType)
            inner = vars(value).get("__wrapped__") if plain else inspect.getattr_static(value, "__wrapped__", None)
            cases = inspect.getattr_static(value, "registry", None) if inner is not None else None
            if plain and (inner is None or not of_library(value)):
                layers.append(value)
            waiting += [inner, *(cases.values() if isinstance(cases, types.MappingProxyType) else ())]
    return layers


@functools.lru_cache(maxsize=_KNOWN_CODE)
def imports_of(code: types.CodeType) -> frozenset[tuple[str, int]]:
    """Return the modules that the code, or a function inside it, imports as it runs: (name, level of a relative
    import). If it reads sys.modules or calls import_module, its texts count too."""
    steps = list(dis.get_instructions(code))
    found = set()
    for place, step in enumerate(steps):
        if step.opname == "IMPORT_NAME":
            level, members = steps[place - 2].argval, steps[place - 1].argval or ()
            found |= {(".".join(filter(None, (step.argval, member))), level) for member in ("", *members)}
    if not {"modules", "import_module", "__import__"}.isdisjoint(code.co_names):
        found |= {(const, 0) for const in code.co_consts if isinstance(const, str)}
    return frozenset(found.union(*(imports_of(const) for const in code.co_consts if isinstance(const, types.CodeType))))


def methods(kind: type, names: set[str]) -> dict[types.FunctionType, str]:
    """Return the methods of a class that code with these names may call, directly or indirectly, with their names.
    Operators, calls and protocols are included, because their names do not occur in the code."""
    found: dict[types.FunctionType, str] = {}
    own = kind.__module__.partition(".")[0] not in OWN_STATE
    protocols = {name for base in kind.__mro__[:-1] for name in vars(base) if own and name.startswith("__")}
    defined = set[str]().union(*map(vars, kind.__mro__[:-1]))
    waiting, seen = (names | (protocols - _ASIDE)) & defined, set[str]()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        for function in _definitions(kind, name):
            found[function] = name
            waiting |= (names_of(function.__code__) & defined) - seen
    return found


def _definitions(kind: type, name: str) -> Iterator[types.FunctionType]:
    """Yield a class's method or property of this name, and those of its bases that it may call: super().loss()."""
    bases = {base.__name__ for base in kind.__mro__[1:-1]}
    for base in kind.__mro__[:-1]:
        if base is not torch.nn.Module and name in vars(base):
            functions = decorated(vars(base)[name])
            yield from functions
            if not any({"super", *bases} & names_of(function.__code__) for function in functions):
                return


@functools.lru_cache(maxsize=4096)
def class_names(kind: type) -> frozenset[str]:
    """Return the names in a module class's own methods, except those that only build or describe it."""
    return frozenset(set().union(*(names_of(function.__code__) for function in class_functions(kind))))


def class_functions(kind: type) -> Iterator[types.FunctionType]:
    """Yield a module class's own methods, except those that only build or describe it.

    Yield what a decorator wraps too if it is user code: transformers' own writes the problem type to the config.
    """
    for base in kind.__mro__:
        if base not in (torch.nn.Module, object):
            for name, value in vars(base).items():
                if name in _AT_FIRST:
                    continue
                function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                if isinstance(function, types.FunctionType):
                    inner = [layer for layer in decorated(function) if not of_library(layer)]
                    yield from dict.fromkeys((function, *inner))


@functools.lru_cache(maxsize=4096)
def is_of_user(kind: type) -> bool:
    """Return True for a user's module class whose bases are the user's and torch's: no library calls methods of it
    that neither the user's code nor torch's names."""
    libraries = (base for base in kind.__mro__[:-1] if of_library_module(base.__module__))
    return not of_library_module(kind.__module__) and all(
        base.__module__.partition(".")[0] in ("torch", "typing", "abc", "builtins") for base in libraries
    )


@functools.lru_cache(maxsize=4096)
def on_host(kind: type) -> bool:
    """Return True for torchmetrics' classes, whose counts change at every call and which no record reads, and for
    DistributedDataParallel, whose own state coordinates its processes."""
    if issubclass(kind, torch.nn.parallel.DistributedDataParallel):
        return True
    return any(base.__module__.partition(".")[0] == "torchmetrics" for base in kind.__mro__)


def of_library(value: Any) -> bool:
    while isinstance(value, functools.partial):
        value = value.func
    code = getattr(value, "__code__", None)
    return code is None or of_library_file(code.co_filename)


def of_library_file(file: str) -> bool:
    return any(part in file for part in _LIBRARIES)


def mentions(value: Any, name: str) -> bool:
    """Return True if the name occurs in a function's code, or in that of functions and methods it calls by name."""
    kind = type(getattr(value, "__self__", None))
    waiting, seen = [value], set()
    while waiting:
        value = waiting.pop()
        function = inspect.unwrap(getattr(value, "__func__", value))
        code = getattr(function, "__code__", None)
        if code is None or code in seen:
            continue
        seen.add(code)
        names = names_of(code)
        if name in names:
            return True
        if not of_library(function):
            found = [scope[n] for n in names for scope in (function.__globals__,) if n in scope]
            found += [inspect.getattr_static(kind, n, None) for n in names]
            waiting += [item for item in found if isinstance(item, types.FunctionType)]
    return False


def of_library_module(module: Any) -> bool:
    """Return True for a module, or the module of a class, that is not user code. module: the module or its name."""
    module = sys.modules.get(module) if isinstance(module, str) else module
    file = getattr(module, "__file__", None)
    if file is None:
        return getattr(module, "__name__", "") != "__main__"
    return of_library_file(file) or module.__name__.partition(".")[0] in OWN_STATE
