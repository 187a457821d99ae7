"""Search for everything that a function and the modules that it calls may read, by the names in their code."""

import argparse
import builtins
import collections.abc
import csv
import functools
import gc
import inspect
import io
import logging
import os
import random
import re
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from torch_bridge.lowering.python.computed_reads import ANY, computed_reads
from torch_bridge.lowering.python.names import (
    OWN_STATE,
    class_functions,
    class_names,
    decorated,
    globals_of,
    is_of_user,
    methods,
    names_of,
    of_library,
    of_library_module,
    on_host,
    states_read,
)
from torch_bridge.lowering.python.places import (
    ARRAYS,
    BYTES,
    CONTAINERS,
    METHODS,
    SIMPLE,
    Absent,
    Cell,
    ClassValue,
    Contents,
    DefaultType,
    Methods,
    OfTensor,
    Place,
    Slots,
    TypeValues,
    attributes_of,
    guarded,
    is_plain,
    unwatched,
)
from torch_bridge.lowering.python.scopes import hooks_of, imported, named

MOST_ITEMS = 64  # of a list or dict whose items are visited
MOST_OBJECTS = 1024  # of a longer one whose items are compared by identity, but whose objects and lists are visited
MOST_BYTES = 1 << 16  # of an array.array or bytearray that is compared at every step
DEPTH = 32  # of objects nested in objects
_OF_EVERY_MODULE = set(vars(torch.nn.Module()))
_SETTINGS = (types.SimpleNamespace, argparse.Namespace)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_WRITER = type(csv.writer(io.StringIO()))
_MACHINERY = "torch_bridge.", "jaxtrain.compiled_step."  # of compiled forwards and steps


class Walk:
    """One search for everything a function may read. names: those in all code that it may reach, as far as known.
    found: those in the code that was reached."""

    def __init__(self, names: set[str], function: Callable, modules: Mapping[str, torch.nn.Module]):
        self.names, self.found = frozenset(names), set[str]()
        self.places = [Place(DefaultType(), None, "torch.get_default_dtype()")]
        self.links: list[Place] = []  # of objects and containers
        self.held: list[Place] = []
        self.tensors: dict[int, tuple[str, dict]] = {}  # attributes of tensors, by the tensor's id
        self.registered: list[Place] = []
        self.containers: list[tuple[str, Any]] = []  # lists, dicts, sets
        self.attributes: list[tuple[str, dict]] = []  # of objects and functions; changes are undone
        # What may get new names: attributes of modules, classes, Python modules; and the names that matter, if not all.
        self.named: list[tuple[str, Any, set[str] | None]] = []
        self.tables: list[tuple[str, dict]] = []  # of modules: parameters, buffers, submodules
        self.generators: list[tuple[str, Any]] = []  # of random numbers
        self.unfollowed: list[str] = []  # changes of a call that cannot be undone
        self.foreign: list[tuple[str, Any]] = []  # containers of torch's and other libraries' own objects
        self._machinery: set[int] = set()
        self._seen: set[int] = set()
        self._watched: set[int] = set()  # classes
        self._uncalled: list[types.FunctionType] = []  # methods of modules whose names no code that was found has
        self._compiled = {id(inner) for module in modules.values() for inner in module.modules()}
        reached = self._callable(function, "", set(), 0)
        for label, module in modules.items():
            self._module(module, "" if len(modules) == 1 else label, reached)
        found = set(self.found)
        for method in self._uncalled:  # a library may call them; their names are not looked for in other objects
            self._method(method, 0)
        self.found = found

    def _callable(self, value: Any, label: str, names: set[str], depth: int) -> set[str]:
        """Visit what a function reads; return the names in its code."""
        if isinstance(value, functools.partial):
            for place, item in enumerate(value.args):
                self._inside(item, f"{label}({place})", names, depth)
            self._visit_items(value.keywords, value.keywords.items(), label, names, depth)
            value = value.func
        functions = decorated(value)
        names = names.union(*(names_of(function.__code__) for function in functions))
        if not isinstance(value, (type, types.BuiltinFunctionType, types.FunctionType, types.MethodType)):
            self._inside(value, label, names | {"__call__"}, depth)  # an object that is called
            return names
        owner = getattr(value, "__self__", None)
        if owner is not None and not isinstance(owner, types.ModuleType):
            self._inside(owner, "self", names, depth)
        for function in functions:
            self._reads(function, names, depth)
        return names

    def _reads(self, function: types.FunctionType, names: set[str], depth: int, method: bool = False) -> None:
        """Visit a function's closure, defaults, globals and attributes."""
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        if not of_library(function):
            self.found |= names_of(function.__code__) | states_read(function.__code__)
            owners = computed_reads(function.__code__) - ({"self"} if method else set())
            self.found.update(_computed_of(named(function.__globals__, owner)) for owner in owners)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if len(Cell(cell)):
                self._visit(Cell(cell), name, cell.cell_contents, name, names, depth)
            else:
                self.named.append((name, Cell(cell), None))
        code, given = function.__code__, function.__defaults__ or ()
        arguments = code.co_varnames[: code.co_argcount][-len(given) :] if given else ()
        for name, item in [*zip(arguments, given, strict=True), *(function.__kwdefaults__ or {}).items()]:
            if not isinstance(item, SIMPLE):
                self._inside(item, f"{function.__name__}({name})", names, depth)
        if not of_library(function):
            self._attributes(function.__name__, vars(function), names, depth)
            self._environment(names_of(function.__code__))
        scope, loaded = function.__globals__, globals_of(function.__code__)
        if not names_of(function.__code__).isdisjoint(("globals", "eval", "exec")):
            loaded = names
        absent = loaded - scope.keys() - vars(builtins).keys()
        if absent and not of_library(function):
            self.named.append((min(absent), Absent(scope, frozenset(absent)), None))
        for name in sorted(loaded & scope.keys()):
            self._visit(scope, name, scope[name], name, names, depth)
        for name in sorted(imported(function)):
            self._visit(sys.modules, name, sys.modules[name], name, names, depth)

    def _environment(self, names: frozenset[str]) -> None:
        if not names.isdisjoint(("environ", "getenv")) and id(os.environ) not in self._seen:
            self._seen.add(id(os.environ))
            self.foreign.append(("os.environ", os.environ))
            self.places += [Place(os.environ, key, f"os.environ[{key!r}]") for key in os.environ]

    @guarded
    def _visit(self, container: Any, key: Any, value: Any, name: str, names: set[str], depth: int) -> None:
        if is_plain(value):
            self.places.append(Place(container, key, name))
        elif isinstance(value, ARRAYS):
            self.held.append(Place(container, key, name))
            self._of_tensor(value, name, names, depth)
        else:
            self.links.append(Place(container, key, name))
            self._inside(value, name, names, depth)

    def _of_tensor(self, value: Any, name: str, names: set[str], depth: int) -> None:
        """Visit the attributes that code has set on a tensor."""
        if isinstance(value, torch.Tensor) and not type(value).__module__.startswith(_MACHINERY):
            attributes = vars(value)
            self.tensors[id(value)] = name, attributes
            for key in attributes.keys() & (names | self.names) if attributes else ():
                self._visit(OfTensor(value), key, attributes[key], f"{name}.{key}", names, depth + 1)

    @guarded
    def _inside(self, value: Any, name: str, names: set[str], depth: int) -> None:
        skipped = id(value) in self._seen or depth > DEPTH or type(value).__module__.startswith(_MACHINERY)
        if skipped or isinstance(value, (torch.Tensor, logging.Logger)):
            return
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            functions = decorated(value)
            if not functions or not all(map(of_library, functions)):
                self._callable(value, name, names, depth + 1)
            elif isinstance(value, types.MethodType):  # Function.apply of a user class
                self._inside(value.__self__, name, names | {"forward", "backward"}, depth)
            return
        if isinstance(value, torch.nn.Module):
            self._module(value, name, names)
            return
        self._seen.add(id(value))
        if isinstance(value, weakref.ReferenceType):
            self._inside(value(), name, names, depth)
        elif isinstance(value, weakref.ProxyTypes):  # its class has every method, also an iterator's
            self._inside(value.mro()[0] if isinstance(value, type) else value.__str__.__self__, name, names, depth)
        elif isinstance(value, (type, types.ModuleType)):
            self._namespace(value, name, names, depth)
        elif isinstance(value, _GENERATORS):
            self.generators.append((name, value))
        elif isinstance(value, (io.IOBase, _WRITER)):
            self.unfollowed.append(f"{name}, a file")
        elif isinstance(value, BYTES):
            self.places += [Place(Contents(value), None, name)] if memoryview(value).nbytes <= MOST_BYTES else []
        elif isinstance(value, collections.abc.Iterator) and of_library_module(type(value).__module__):
            self.unfollowed.append(f"{name}, an iterator")
        elif isinstance(value, CONTAINERS):
            self._container(value, name, names, depth)
        elif isinstance(value, types.MappingProxyType):
            self._inside(gc.get_referents(value)[0], name, names, depth)
        elif isinstance(value, types.BuiltinFunctionType):
            owner = value.__self__
            if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):  # its apply, since torch 2.14
                self._inside(owner, name, names | {"forward", "backward"}, depth)
            elif not isinstance(owner, (type, types.ModuleType)):  # settings.get
                self._inside(owner, name, names, depth)
        elif isinstance(value, tuple):  # plain items change only with the tuple
            objects = [pair for pair in enumerate(value[:MOST_ITEMS]) if not is_plain(pair[1])]
            self._visit_items(value, objects, name, names, depth)
        else:
            self._object(value, name, names, depth)

    def _namespace(self, value: Any, name: str, names: set[str], depth: int) -> None:
        """Visit a Python module or a class."""
        if of_library_module(value.__module__ if isinstance(value, type) else value):
            return
        names = names | self.names
        if not isinstance(value, type):
            self._note(name, vars(value), names, value)
            self._members(vars(value), vars(value), value, name, names, depth)
            return
        called = methods(value, names)
        for function in called:
            self._method(function, depth)
        self._watch_methods(value, called)
        for base in value.__mro__:
            if not of_library_module(base.__module__):
                self._note(name, vars(base), names, value)
                self._members(TypeValues(base), vars(base), value, name, names, depth)
        if not of_library_module(type(value).__module__):  # a metaclass
            for function in methods(type(value), names):
                self._method(function, depth)
            self._class_values(value, name, names, depth)

    def _watch_methods(self, kind: type, called: Mapping[types.FunctionType, str]) -> None:
        """Watch whether methods of a user class are replaced."""
        if id(kind) not in self._watched and not of_library_module(kind.__module__):
            self._watched.add(id(kind))
            names = sorted(set(called.values()))
            self.links += [Place(Methods(kind), name, f"{kind.__name__}.{name}") for name in names]

    def _note(self, name: str, held: Mapping[str, Any], names: set[str], owner: Any) -> None:
        """Note what may get new names; all of them matter if they may be read by computed names."""
        every = not self.names.isdisjoint((ANY, _computed_of(owner)))
        self.named.append((name, held, None if every else names | self.names))

    def _members(self, container: Any, held: Mapping[str, Any], owner: Any, name: str, names: set[str], depth: int):
        """Visit the values of a Python module or class, except a class's methods."""
        skipped = METHODS if isinstance(owner, type) else ()
        wanted = names & held.keys()
        if _computed_of(owner) in self.names:
            wanted |= {key for key in held if not key.startswith("__")}
        elif ANY in self.names:
            wanted |= {
                key
                for key, item in held.items()
                if (is_plain(item) or isinstance(item, CONTAINERS)) and not key.startswith("__")
            }
        for key in sorted(wanted):
            if not isinstance(held[key], skipped):
                self._visit(container, key, held[key], f"{name}.{key}", names, depth + 1)

    def _method(self, function: types.FunctionType, depth: int) -> None:
        if not of_library(function):
            self._reads(function, set(names_of(function.__code__)), depth + 1, method=True)

    def _container(self, value: Any, name: str, names: set[str], depth: int) -> None:
        (self.foreign if id(value) in self._machinery else self.containers).append((name, value))
        if not isinstance(value, set) and len(value) <= MOST_OBJECTS:
            items = value.items() if isinstance(value, dict) else enumerate(unwatched(value))
            if len(value) > MOST_ITEMS:
                items = [(key, item) for key, item in items if not isinstance(item, ARRAYS) and not is_plain(item)]
            self._visit_items(value, items, name, names, depth)

    def _object(self, value: Any, name: str, names: set[str], depth: int) -> None:
        kind = type(value)
        if kind.__module__ == "builtins":
            return
        called = methods(kind, {*names, *self.names})
        if isinstance(value, torch.optim.Optimizer) and re.findall(r"\w+", name)[-1] + ".state" in self.names:
            self.unfollowed.append(f"the state of {name}, of which the device holds the newest")
        named = set[str]().union(*(names_of(function.__code__) for function in called))
        names = names | named
        for function in called:
            self._method(function, depth)
        self._watch_methods(kind, called)
        own, attributes = kind in _SETTINGS or not of_library_module(kind.__module__), attributes_of(value)
        names = names | self._computed(value, called) if own else names
        if attributes is not None and kind.__module__.partition(".")[0] in OWN_STATE:
            self._machinery |= {id(item) for item in attributes.values() if isinstance(item, CONTAINERS)}
            self._note(name, attributes, names, value)
            self._visitnamed(attributes, name, names, depth)
        elif attributes is not None:
            self._attributes(name, attributes, names, depth)
        if own:
            slots = Slots(value)
            self.named += [(name, slots, None)] if hasattr(kind, "__slots__") else []
            for key in sorted((names | self.names).intersection(slots.keys())):
                self._visit(slots, key, slots[key], f"{name}.{key}", names, depth + 1)
        if attributes is not None:
            self._class_values(value, name, names, depth)
        for function in decorated(value):  # a decorator that is an object, functools.lru_cache
            if not of_library(function):
                self._reads(function, names | names_of(function.__code__), depth + 1)

    def _attributes(self, name: str, attributes: dict, names: set[str], depth: int) -> None:
        self.attributes.append((name, attributes))
        self._visitnamed(attributes, name, names, depth)

    def _visitnamed(self, attributes: dict, name: str, names: set[str], depth: int) -> None:
        for key, item in list(attributes.items()):
            if key in names or key in self.names:
                self._visit(attributes, key, item, f"{name}.{key}", names, depth + 1)

    def _visit_items(self, container: Any, items: Any, name: str, names: set[str], depth: int) -> None:
        for key, item in list(items):
            shown = repr(key) if isinstance(key, SIMPLE) else type(key).__name__
            self._visit(container, key, item, f"{name}[{shown}]", names, depth + 1)

    def _module(self, module: torch.nn.Module, label: str, names: set[str]) -> None:
        kinds = {type(inner) for inner in module.modules()}
        of_libraries = (class_names(kind) for kind in kinds if of_library_module(kind.__module__))
        names = names.union(self.names, *of_libraries)  # a library's module may read those inside it
        for path, inner in module.named_modules():
            if id(inner) in self._seen:
                continue
            self._seen.add(id(inner))
            prefix = ".".join(filter(None, (label, path))) or type(module).__name__
            elsewhere = id(inner) not in self._compiled
            if on_host(type(inner)):
                if elsewhere and isinstance(vars(inner).get("_defaults"), dict):  # a metric of torchmetrics
                    lists = [(prefix, item) for item in vars(inner).values() if isinstance(item, list)]
                    self.containers += [(prefix, vars(inner)), *lists]
                continue
            called = methods(type(inner), {"forward", *names})
            functions = called if is_of_user(type(inner)) else class_functions(type(inner))
            wanted = names.union(*(names_of(function.__code__) for function in functions))
            computed = self._computed(inner, called)
            wanted = (wanted | computed) - _OF_EVERY_MODULE
            self._watch_methods(type(inner), called)
            self.places += [Place(vars(inner), "training", f"{prefix}.training")] if elsewhere else []
            for key, item in list(vars(inner).items()):
                if key in wanted:
                    self._visit(vars(inner), key, item, f"{prefix}.{key}", wanted, 1)
            for table in (inner._parameters, inner._buffers):
                self.registered += [Place(table, key, f"{prefix}.{key}") for key in table]
                for key, tensor in table.items():
                    self._of_tensor(tensor, f"{prefix}.{key}", wanted, 1)
            self.tables += [(prefix, table) for table in (inner._parameters, inner._buffers, inner._modules)]
            self.named.append((prefix, vars(inner), None if computed else wanted))
            if not type(inner).__module__.startswith("torch.nn."):
                self._class_values(inner, prefix, wanted, 1)
            for function in functions:
                if function in called:
                    self._method(function, 0)
                else:
                    self._uncalled.append(function)
            for hook in hooks_of(inner):
                if not of_library(hook) or not of_library_module(type(hook).__module__):
                    self._callable(hook, f"a hook of {prefix}", set(), 1)

    def _computed(self, owner: Any, called: Mapping[types.FunctionType, str]) -> set[str]:
        """Return the names of an object's attributes if they may be read by computed names.

        called: the object's methods that may be called.
        """
        by_itself = any("self" in computed_reads(method.__code__) for method in called if not of_library(method))
        if not by_itself and self.names.isdisjoint((ANY, _computed_of(owner))):
            return set()
        scopes = [base for base in type(owner).__mro__ if not of_library_module(base.__module__)]
        return set(attributes_of(owner) or ()).union(*map(vars, scopes))

    def _class_values(self, owner: Any, name: str, wanted: set[str], depth: int) -> None:
        held = vars(owner) if isinstance(owner, type) else attributes_of(owner) or {}
        kind: type = type(owner)
        for base in kind.__mro__[:-1]:
            for key in (wanted | self.names) & vars(base).keys() - held.keys() - _OF_EVERY_MODULE:
                value = vars(base)[key]
                if not isinstance(value, METHODS) and inspect.getattr_static(type(owner), key) is value:
                    self._visit(ClassValue(owner), key, value, f"{name}.{key}", wanted, depth + 1)


def _computed_of(owner: Any) -> str:
    """Return the name that stands for all attributes of an object; of any object for None."""
    return ANY if owner is None else f"{ANY} of {id(owner)}"
