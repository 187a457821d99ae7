"""Detect Python state outside tensors that a module changes or reads: a record would keep the values of one call.

A module is recorded once, and its Python code runs only then. `self.step += 1`, `random.random()`, a numpy mask or a
clock become constants of that record. They are found by comparing state before and after a call and by recording twice.
"""

import contextlib
import copy
import functools
import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from torch_bridge.lowering.errors import MACHINERY, Obstacle, module_path, source_line, written_line
from torch_bridge.lowering.python import assigned_buffers
from torch_bridge.lowering.python.places import Place
from torch_bridge.lowering.python.seeded_draws import SEEDS, Draws

ADVICE_STATE = (
    "Python runs once, while the module is recorded. Keep what changes in a buffer (self.register_buffer('step', "
    "torch.zeros(())), then self.step += 1), draw random numbers with torch (torch.rand), and pass what comes from "
    "outside as an input."
)
OF_EVERY_MODULE = set(vars(torch.nn.Module())) | {"forward"}  # torch watches buffers and parameters
_LIBRARY = os.path.dirname(os.__file__)
_DEPTH = 3  # of containers nested in containers


class Watch:
    """Detect changes that a module's call makes in Python: attributes of its submodules, random generators.

    changed: (module, its path, attribute, value before, value after). drawn: the lines that drew random numbers.
    """

    def __init__(self, module: torch.nn.Module):
        self.module = module
        self.before = _snapshot(module)
        self.hooks = _hooks_of(module)
        self.hooks_after = self.hooks
        self.generators = random.getstate(), np.random.get_state()
        self.changed: list[tuple[torch.nn.Module, str, str, Any, Any]] = []
        self.drawn: list[str] = []
        self.misfits: list[str] = []  # registrations and replacements that no record keeps

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Watch the forward pass inside torch.export, which puts attributes back as they were."""
        generators, begun = _generators(), _hooks_of(self.module)  # including the recording's own hooks
        registered = assigned_buffers.registered(self.module)
        try:
            yield
        finally:
            if _generators() != generators:
                self.drawn.append("")
            added = {id(table): {key: table[key] for key in table if key not in held} for table, held in begun}
            self.hooks_after = [(table, held | added.get(id(table), {})) for table, held in self.hooks]
            self.misfits += assigned_buffers.put_back(self.module, registered)
            after = _snapshot(self.module)
            for key, (module, path, name, old) in self.before.items():
                new = after[key][3] if key in after else None
                if not _same(old, new):
                    self.changed.append((module, path, name, old, new))
            for key, (module, path, name, new) in after.items():
                if key not in self.before:
                    self.changed.append((module, path, name, None, new))

    def names(self) -> list[str]:
        """Return the attributes that the call changes, with their modules' paths."""
        return [
            f"{path}.{name}".removeprefix(".")
            for module, path, name, _, _ in self.changed
            if not computed_anew(module, name)
        ]

    def values(self) -> Iterator[tuple[Place, Any]]:
        """Yield the places of attributes, and of items of dicts in them, that the call sets anew, and their values."""
        for module, path, name, old, new in self.changed:
            if (id(module), name) in self.before:
                yield Place(vars(module), name, f"{path}.{name}"), new
            if isinstance(old, _Container) and isinstance(new, _Container) and isinstance(old.held, dict):
                changed = (key for key in old.held.keys() & new.held.keys() if not _same(old.held[key], new.held[key]))
                yield from ((Place(old.owner, key, f"{path}.{name}"), new.held[key]) for key in changed)

    def restore(self) -> None:
        """Put every attribute, hook and the random generators back as they were before the call."""
        _put_hooks(self.hooks)  # transformers' modules register and note some at their first call
        random.setstate(self.generators[0])
        np.random.set_state(self.generators[1])
        for key, (module, _, name, _) in _snapshot(self.module).items():
            if key not in self.before:
                vars(module).pop(name, None)
        for module, _, name, old in self.before.values():
            _put(module, name, old)

    def advance(self) -> None:
        """Set attributes and hooks as the call left them; tensors get other numbers."""
        _put_hooks(self.hooks_after)
        for module, _, name, _, new in self.changed:
            _put(module, name, _other(new))


def computed_anew(module: torch.nn.Module, name: str) -> bool:
    """Return True for the weight that torch's weight_norm and spectral_norm set before every forward pass, and for the
    lists in which a recurrent layer keeps its parameters a second time."""
    if isinstance(module, torch.nn.RNNBase) and name in ("_flat_weights", "_flat_weight_refs"):
        return True
    hooks = module._forward_pre_hooks.values()
    return any(type(h).__module__.startswith("torch.nn.utils.") and getattr(h, "name", "") == name for h in hooks)


@contextlib.contextmanager
def watched(
    module: torch.nn.Module, watch: Watch, begin: Callable[[], None], end: Callable[[], None]
) -> Iterator[None]:
    """Watch calls of the module while active. begin, end: called when one begins and ends."""
    forward = module.forward

    @functools.wraps(forward)
    def observed(*args, **kwargs):
        begin()
        try:
            with watch.call():
                buffers = assigned_buffers.of(module)
                return assigned_buffers.write(buffers, forward(*args, **kwargs), watch.misfits)
        finally:
            end()

    vars(module)["forward"] = observed
    try:
        yield
    finally:
        del vars(module)["forward"]


def _hooks_of(module: torch.nn.Module) -> list[tuple[dict, dict]]:
    """Return every table of hooks of the module and its parts, each with a copy of its contents."""
    named = [item for inner in module.modules() for item in vars(inner).items()]
    tables = [table for name, table in named if "_hooks" in name and isinstance(table, dict)]
    return [(table, dict(table)) for table in tables]


def _put_hooks(tables: list[tuple[dict, dict]]) -> None:
    for table, held in tables:
        table.clear()
        table.update(held)


def obstacles(module: torch.nn.Module, inputs: tuple, watch: Watch, draws: Draws) -> Iterator[Obstacle]:
    """Yield the lines that compute with Python state, found by recording the module twice more, with fixed sizes.

    watch: of the record that succeeded. The module's attributes are left as they were before it.
    """
    for what in dict.fromkeys(watch.misfits):
        yield Obstacle(what, "")
    try:
        watch.restore()
        first = _trace(module, inputs)
        watch.restore()
        watch.advance()
        with draws.marked(), _drawing(watch.drawn) if watch.drawn else contextlib.nullcontext():
            second = _trace(module, inputs)
    finally:
        watch.restore()
    for line in dict.fromkeys(draws.seeded):
        yield Obstacle(SEEDS, line)
    lines = [line for line in dict.fromkeys(watch.drawn) if line]
    for line in lines or ([""] if watch.drawn else []):
        yield Obstacle("random numbers of Python or numpy are drawn", line)
    if first is None or watch.drawn:
        return
    names = ", ".join(watch.names()[:3])
    if second is None:
        if watch.changed:
            yield Obstacle(f"the next call finds another {names}, which this one has set")
        return
    node = difference(first, second)
    if node is not None and not (watch.changed and _are_caches(module, inputs, watch)):
        because = f", because the call changes {names}" if names else ""
        where = source_line(getattr(node, "stack_trace", None) or "")
        yield Obstacle(f"a second call computes something else{because}", where, module_path(node))


def _are_caches(module: torch.nn.Module, inputs: tuple, watch: Watch) -> bool:
    """Return True if calls leave the same values whatever their inputs and number: cached results of the parameters,
    which the record computes at every call."""
    flipped = pytree.tree_map_only(torch.Tensor, lambda x: x.flip(tuple(range(x.dim()))), inputs)
    left = []
    try:
        for calls in ((inputs,), (flipped,), (inputs, flipped)):
            twin = copy.deepcopy(module)
            with torch.no_grad():
                for given in calls:
                    twin(*given)
            parts = {path.removeprefix("wrapped_module").removeprefix("."): part for path, part in twin.named_modules()}
            left.append(pytree.tree_flatten([getattr(parts[path], name) for _, path, name, _, _ in watch.changed]))
    except Exception:  # torch cannot call it here: not known as caches
        return False
    (first, structure), *others = left
    return all(other == structure for _, other in others) and all(
        _same_tensor(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else _same(a, b)
        for values, _ in others
        for a, b in zip(first, values, strict=True)
    )


def _trace(module: torch.nn.Module, inputs: tuple) -> torch.export.ExportedProgram | None:
    try:
        return torch.export.export(module, inputs, strict=False)
    except Exception:  # the record with free sizes succeeded, so this is no fault of the module's
        return None


def difference(first: torch.export.ExportedProgram, second: torch.export.ExportedProgram) -> Any:
    """Return the first node of the second program that computes something else; None if the two are equal."""
    ours, theirs = _nodes(first.graph_module), _nodes(second.graph_module)
    for a, b in zip(ours, theirs, strict=False):
        if (a.op, _target(a)) != (b.op, _target(b)) or not _equal_arguments(a, b):
            return b
    if len(ours) != len(theirs):
        longer = theirs if len(theirs) > len(ours) else ours
        return longer[min(len(ours), len(theirs))]
    constants = [
        {spec.arg.name: program.constants.get(str(spec.target)) for spec in program.graph_signature.input_specs}
        for program in (first, second)
    ]
    for a, b in zip(ours, theirs, strict=True):
        old, new = constants[0].get(a.name), constants[1].get(b.name)
        if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and not _same_tensor(old, new):
            return next(iter(b.users), b)
    return None


def _target(node: torch.fx.Node) -> str:
    """Return an operator's name; for a higher-order one, which each record makes anew, the name of its class."""
    return str(node.target) if isinstance(node.target, (str, torch._ops.OpOverload)) else type(node.target).__name__


def _nodes(graph_module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    modules = [inner for inner in graph_module.modules() if isinstance(inner, torch.fx.GraphModule)]
    return [node for inner in modules for node in inner.graph.nodes]


def _equal_arguments(a: torch.fx.Node, b: torch.fx.Node) -> bool:
    markers = str(a.target).startswith("torch_bridge.") and not str(a.target).startswith("torch_bridge.print")
    if markers:  # the record's own operators, which carry running numbers
        return a.all_input_nodes == [] or [n.name for n in a.all_input_nodes] == [n.name for n in b.all_input_nodes]
    return _literals((a.args, a.kwargs)) == _literals((b.args, b.kwargs))


def _literals(value: Any) -> Any:
    """Return a node's arguments as text and tuples: numbers and names count, objects that each record makes do not."""
    if isinstance(value, dict):
        return tuple((key, _literals(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_literals, value))
    if isinstance(value, (int, float, complex, str, bool, type(None), torch.dtype, torch.device, slice)):
        return repr(value)
    return value.name if isinstance(value, torch.fx.Node) else type(value).__name__


def _same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a is b:
        return True
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a, b) or _both_nan(a, b))


def _both_nan(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.is_floating_point() and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def _generators() -> tuple:
    state = np.random.get_state(legacy=False)["state"]
    return random.getstate(), state["pos"], state["key"].tobytes()


@contextlib.contextmanager
def _drawing(lines: list[str]) -> Iterator[None]:
    """While active, add each line outside torch after which a generator of Python or numpy has moved on to `lines`."""
    known = [_generators()]

    def trace(frame, event, _):
        code = frame.f_code
        if any(part in code.co_filename for part in MACHINERY) or _of_python(code.co_filename):
            return None
        line = [frame.f_lineno]

        def follow(frame, event, _):
            now = _generators()
            if now != known[0]:
                known[0] = now
                lines.append(written_line(code, line[0]))
            line[0] = frame.f_lineno
            return follow

        return follow

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def _of_python(file: str) -> bool:
    return file.startswith("<frozen ") or (file.startswith(_LIBRARY) and "site-packages" not in file)


def _snapshot(module: torch.nn.Module) -> dict[tuple, tuple]:
    """Return (module, attribute) -> module, its path, attribute, and the value with copies of its containers."""
    found = {}
    for path, inner in module.named_modules():
        path = path.removeprefix("wrapped_module").removeprefix(".")
        for name, value in vars(inner).items():
            if name not in OF_EVERY_MODULE:
                found[id(inner), name] = (inner, path, name, _copy(value))
    return found


def _copy(value: Any, depth: int = _DEPTH) -> Any:
    if depth and type(value) is set:
        return _Container(value, frozenset(value))  # not in order: a refilled set may have another
    if depth and type(value) in (list, tuple):
        return _Container(value, [_copy(item, depth - 1) for item in value])
    if depth and issubclass(type(value), dict):  # isinstance() would run an object's own __class__
        return _Container(value, {key: _copy(item, depth - 1) for key, item in value.items()})
    return value


class _Container:
    """A list, tuple, set or dict, and a copy of what it held."""

    def __init__(self, owner: Any, held: Any):
        self.owner, self.held = owner, held


def _same(old: Any, new: Any) -> bool:
    if type(old) is _Container and type(new) is _Container:
        if type(old.held) is not type(new.held) or len(old.held) != len(new.held):
            return False
        if isinstance(old.held, dict):
            return old.held.keys() == new.held.keys() and all(_same(old.held[k], new.held[k]) for k in old.held)
        if isinstance(old.held, frozenset):
            return old.held == new.held
        return all(_same(a, b) for a, b in zip(old.held, new.held, strict=True))
    if old is new:
        return True
    plain = (int, float, complex, bool, str, bytes, np.generic)
    return type(old) is type(new) and issubclass(type(old), plain) and (old == new or old != old)


def _put(module: torch.nn.Module, name: str, value: Any) -> None:
    vars(module)[name] = _whole(value)


def _whole(value: Any) -> Any:
    """Return the saved value; its containers are the original objects, holding again what they held."""
    if type(value) is not _Container:
        return value
    owner, held = value.owner, value.held
    if isinstance(held, dict):
        items = {key: _whole(item) for key, item in held.items()}
        if not _holds(owner, items):  # write only if changed: some dicts refuse writes
            owner.clear()
            owner.update(items)
        return owner
    items = [_whole(item) for item in held]
    if isinstance(owner, list):
        owner[:] = items
    elif isinstance(owner, set) and owner != held:  # a refilled set may have another order
        owner.clear()
        owner.update(items)
    return owner


def _holds(owner: dict, items: dict) -> bool:
    return [*owner] == [*items] and all(owner[key] is item for key, item in items.items())


def _other(value: Any) -> Any:
    """Return the value as the next call finds it; tensors get other numbers, so that a call that reads them differs."""
    if isinstance(value, torch.Tensor):
        shape = [int(size) if isinstance(size, int) else 2 for size in value.shape]
        return torch.ones(shape, dtype=value.dtype)
    if isinstance(value, _Container):
        held = value.held
        if isinstance(held, dict):
            return {key: _other(item) for key, item in held.items()}
        return type(value.owner)(_other(item) for item in held)
    return value
