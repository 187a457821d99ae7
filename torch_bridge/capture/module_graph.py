"""A module's forward pass, or its loss, as one graph that TorchDynamo captures and that JAX differentiates.

The modules and tensors that the code reaches are inputs of the graph; numbers and settings that it reads are constants.
Code that has a part in its own backward pass, or that changes something in Python at every call, is refused.
"""

import collections
import contextlib
import contextvars
import copy
import functools
import logging
import re
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_bridge.capture import torch_api
from torch_bridge.capture.module_hooks import has_module_hooks, marked_hooks
from torch_bridge.capture.padded_encoder import zeros_at_padding
from torch_bridge.capture.polyfills import plain_forwards
from torch_bridge.capture.replay import check_backward, name_of, nodes_of
from torch_bridge.capture.traced import Result, State, Traced
from torch_bridge.lowering.errors import CannotRecord, Unfollowed, source_line
from torch_bridge.lowering.interpreter import Graph
from torch_bridge.lowering.python import assigned_buffers
from torch_bridge.lowering.python.state import Watch
from torch_bridge.lowering.recording_lock import quiet
from torch_bridge.lowering.structure import with_fields
from torch_bridge.random_state import undrawn

log = logging.getLogger(__name__)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def module_graph(
    inputs: tuple, state: State, free: Sequence[Collection[int]], watch: Watch
) -> tuple[Graph, dict[int, torch.Tensor]]:
    """Return the graph of `state.entry(*inputs)`, and the tensors from outside the module that it holds as constants,
    by id.

    inputs: examples, containers of tensors and plain values; sizes matter,
    values do not. free: of each leaf of the inputs, the axes that may have other sizes later. watch: notes what the
    call changes in Python, which stays changed. Raises CannotRecord for code that does not become one graph, and
    whatever torch raises as it runs the code on tensors without values.
    """
    leaves, spec = pytree.tree_flatten(inputs)
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
            raise Unfollowed(f"it is given a {type(leaf).__name__}")
    if torch_api.is_off() or torch_api.has_global_hooks():
        raise Unfollowed("torch.compile is switched off, or hooks see every module")
    try:
        return _settled(leaves, spec, state, free, watch)
    except Exception as error:
        if torch_api.asks_for_gradients(error):  # of an input: it has one from the start
            watch.restore()
            leaves = [leaf.requires_grad_() if _is_float(leaf) else leaf for leaf in leaves]
            return _settled(leaves, spec, state, free, watch, _call_detached)
        needs_numbers = isinstance(error, _NeedsNumbers) or torch_api.needs_numbers(error)
        if not (needs_numbers and any(isinstance(leaf, torch.Tensor) for leaf in leaves)):
            raise
    watch.restore()
    return _settled(leaves, spec, state, None, watch)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


class _NeedsNumbers(Unfollowed):
    """Error for code that Dynamo follows where sizes are plain numbers."""


def _settled(
    leaves: list, spec: Any, state: State, free: Any, watch: Watch, call: Callable | None = None
) -> tuple[Graph, dict]:
    """Return the result of module_graph. Code that changes something in Python is read twice: what it sets once and for
    all, as a default, or only for others to look at, leads to the same graph again."""
    first = _Capture(state.entry, leaves, spec, call or _call)
    with watch.call():
        result = first.graph(free, state)
    changed = first.changed()
    if not changed and not first.left:
        return result
    second = _Capture(state.entry, leaves, spec, call or _call)
    second.read(free)
    plain = [re.findall(r"\w+", name.removesuffix(".__self__"))[-1] for name in changed]  # Dynamo's names are paths
    names = ", ".join((watch.names() or plain or ["an object"])[:3])
    reads = {id(mark) for mark in first.left} & {id(real) for real in second.reals}
    node = next((b for a, b in zip(first.nodes, second.nodes, strict=False) if a[0] != b[0]), None)
    if node is None and len(first.nodes) == len(second.nodes) and not reads:
        return result
    if _are_caches(state.entry, leaves, spec, watch):
        return result
    where = "" if reads else source_line((node or (second.nodes or first.nodes)[-1])[1], own=True)
    because = f", because the call changes {names}"
    raise Unfollowed(f"a second call computes something else{because}" + (f", at {where}" if where else ""))


def _are_caches(entry: torch.nn.Module, leaves: list, spec: Any, watch: Watch) -> bool:
    """Return True if calls leave the same values in the attributes that they change, whatever their inputs and number,
    and a second call computes what a first one does: cached results, which the graph computes at every call. What is
    cached of parameters that are trained is no such result, as torch goes on with the old one."""
    changed = {(path, name) for _, path, name, _, _ in watch.changed}
    one, other = (pytree.tree_unflatten(each, spec) for each in (leaves, list(map(_another, leaves))))
    contents, outputs = [], []
    watch.restore()
    try:
        for calls, moved in (((one,), 0), ((other,), 0), ((one, other), 0), ((one,), entry.training)):
            twin = copy.deepcopy(entry)
            with torch.no_grad(), quiet(), undrawn():
                for parameter in twin.parameters():
                    parameter.add_(0.125 if moved and parameter.requires_grad else 0)
                for inputs in calls:
                    torch.manual_seed(0)
                    output = twin(*inputs)
            outputs.append(pytree.tree_leaves(with_fields(output)))
            contents.append([value for _, *key, value in Watch(twin).before.values() if tuple(key) in changed])
    except Exception:  # torch cannot call it here: not known as caches
        return False
    return bool(changed) and _same_values(outputs[1], outputs[2]) and all(map(_same_values, contents[1:], contents))


def _another(leaf: Any) -> Any:
    """Return other values of the same form, which are valid as classes and indices of two kinds."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.is_floating_point() or leaf.is_complex():
        return torch.linspace(0.1, 0.9, leaf.numel()).reshape(leaf.shape).to(leaf.dtype)
    return (leaf == 0).to(leaf.dtype)


def _same_values(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if hasattr(a, "held") and hasattr(b, "held"):  # containers
        return _same_values(a.held, b.held)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same_values(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same_values, a, b))
    return isinstance(a, _PLAIN) and type(a) is type(b) and a == b


def _copy(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.detach().requires_grad_(leaf.requires_grad)


def _call(entry: torch.nn.Module, inputs: tuple) -> Any:
    """Call the entry's forward; this is what Dynamo captures."""
    return entry.forward(*inputs)


@torch.compiler.allow_in_graph
def _an_output(value: torch.Tensor) -> torch.Tensor:
    """Mark an output in Dynamo's graph."""
    return value.view_as(value)


def _call_detached(entry: torch.nn.Module, inputs: tuple) -> Any:
    """Call as `_call`, where a gradient begins inside: Dynamo hands out such tensors only if they are detached."""
    detached = lambda value: _an_output(value).detach()
    return pytree.tree_map_only(torch.Tensor, detached, with_fields(entry.forward(*inputs)))


def _unmark(gm: torch.fx.GraphModule) -> None:
    for node in list(gm.graph.nodes):
        if node.target is _an_output:
            for detached in list(node.users):
                detached.replace_all_uses_with(node.args[0])
                gm.graph.erase_node(detached)
            gm.graph.erase_node(node)
    gm.recompile()


class _Capture:
    """One capture. Dynamo reads the code and asks for a program of its graph; that program only marks its results."""

    def __init__(self, entry: torch.nn.Module, leaves: list, spec: Any, call: Callable):
        self._entry, self._spec, self._call = entry, spec, call
        self._leaves = [_copy(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._symbolic = False
        self._marks: list[Any] = []
        self._before: list[tuple[str, Any, Any]] = []  # what the code changes in Python: name, object, its contents
        self._only_read = False
        self.nodes: list[tuple[Any, str]] = []  # of Dynamo's graph: what each computes, and its line
        self.reals: list[Any] = []  # the tensors that the graph takes
        self.left: list[Any] = []  # marks of results that stay in Python
        self.traced: Traced | None = None

    def read(self, free: Any) -> None:
        """Let Dynamo read the code, for `nodes` and `reals` alone."""
        self._only_read = True
        with contextlib.suppress(_Enough):
            self._run(free)

    def changed(self) -> list[str]:
        """Return the names of the objects outside that the call has changed for good."""
        return [name for name, value, before in self._before if _contents(value) != before]

    @contextlib.contextmanager
    def _prepared(self) -> Iterator[None]:
        """Inside the context, modules show Dynamo what torch's own machinery does around their calls."""
        graded = any(inner.training for inner in self._entry.modules())
        hooks, zeros = marked_hooks(self._entry), zeros_at_padding(self._entry, graded)
        with hooks, zeros, plain_forwards(self._entry), warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\._dynamo\.")  # with symbols for sizes, and shown later
            yield

    def _run(self, free: Any) -> Any:
        self._symbolic = free is not None
        captured = torch_api.whole(self._call, self._compile, self._ignore, self._ignore, **torch_api.OF_MODULES)
        try:
            with torch.enable_grad(), torch_api.free_sizes(self._leaves, free), self._prepared():
                return captured(self._entry, pytree.tree_unflatten(self._leaves, self._spec))
        except Exception as error:
            cause = torch_api.cause_of(error)
            if cause is error:
                raise
            raise cause from error

    def graph(self, free: Sequence[Collection[int]] | None, state: State) -> tuple[Graph, dict]:
        buffers = assigned_buffers.of(self._entry)
        returned = self._run(free)
        if self.traced is None:
            raise Unfollowed("it computes nothing with tensors")
        leaves, spec = pytree.tree_flatten(with_fields(returned))
        places = {id(mark): Result(place) for place, mark in enumerate(self._marks)}
        assigned = self._assigned(buffers, places)
        returned_or_assigned = {*map(id, leaves), *map(id, assigned.values())}
        self.left = [mark for mark in self._marks if id(mark) not in returned_or_assigned]
        known = lambda leaf: leaf if isinstance(leaf, (torch.Tensor, *_PLAIN)) else None  # a cache of keys and values
        outputs = [places.get(id(leaf), known(leaf)) for leaf in leaves]
        values = {old: places.get(id(new), new) for old, new in assigned.items()}
        return self.traced.finished(outputs, spec, self._leaves, state, values)

    def _assigned(self, buffers: list, places: dict[int, Result]) -> dict[int, Any]:
        """Return what the code has assigned to buffers, by the id of the old one, which is put back: marks of results,
        or other buffers. Raises CannotRecord for another form than the old one has."""
        found, known = {}, {id(old) for _, _, _, old in buffers} | places.keys()
        for part, path, name, old in buffers:
            new = part._buffers.get(name)
            if new is old:
                continue
            part._buffers[name] = old
            full = f"{path}.{name}".removeprefix(".")
            if id(new) not in known or new is None or old is None or new.shape != old.shape or new.dtype != old.dtype:
                raise CannotRecord(f"a call makes buffer {full} {_form(new)}, it was {_form(old)}")
            found[id(old)] = new
        return found

    def _ignore(self, _: Any) -> None:
        """Guards are not needed: what the code reads in Python is watched by its names."""

    def _compile(self, gm: torch.fx.GraphModule, fakes: Sequence[Any]) -> Callable:
        """Trace the graph: a backend of Dynamo's. Raises CannotRecord to refuse it."""
        _unmark(gm)
        if wrong := torch_api.stale() or torch_api.lost_writes() or torch_api.keeps_padding(gm.graph):
            raise Unfollowed(f"Dynamo does not follow {wrong}")
        if where := torch_api.unguarded_line(symbolic=False):
            raise Unfollowed(f"Dynamo does not follow what comes of this line, at {where}")
        if where := torch_api.unguarded_line(self._symbolic):
            raise _NeedsNumbers(f"Dynamo compares sizes wrongly, at {where}")
        check_backward(gm)
        reals = torch_api.real_inputs(gm)
        self.reals = reals
        self.nodes = [((n.op, str(n.target), str(n.args), str(n.kwargs)), n.stack_trace or "") for n in gm.graph.nodes]
        self.nodes += [(id(real), "") for real in reals if isinstance(real, torch.nn.Parameter)]
        if self._only_read:
            raise _Enough
        for line in torch_api.printed_lines():
            _tell_print(line)
        if torch_api.hooked():
            raise Unfollowed("it registers a hook on a tensor from outside, one more at every call (do that once)")
        self._before = [(name, value, _contents(value)) for name, value in torch_api.written_objects()]
        if self._before and _has_hooks(gm):
            raise Unfollowed("it changes objects in Python, which its backward hooks may read (return the values)")
        self.traced = Traced.of(gm, fakes, self._leaves, self._entry)
        self._marks = [_Number() if kind is int else None for kind in self.traced.kinds]
        self._marks = [_like(value) if mark is None else mark for mark, value in self.traced.marked(self._marks)]
        return lambda *inputs: self._marks


def _has_hooks(gm: torch.fx.GraphModule) -> bool:
    return has_module_hooks(gm) or any("hook" in name_of(node) for node in nodes_of(gm))


def _like(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the form of a result, with present sizes."""
    sizes = [size.node.hint if isinstance(size, torch.SymInt) else size for size in value.shape]
    return torch.zeros([2 if size is None else size for size in sizes], dtype=value.dtype)


def _form(value: torch.Tensor | None) -> str:
    return "None" if value is None else f"{value.dtype} of shape {tuple(value.shape)}"


@functools.cache
def _tell_print(line: str) -> None:
    log.warning("print at %s is left out: a compiled step does not print", line)


class _Enough(Exception):
    """Ends a capture whose graph is known."""


def _contents(value: Any) -> Any:
    """Return what an object holds, to be compared: by identity, but for plain values."""
    identity = lambda item: (type(item), item) if isinstance(item, _PLAIN) else id(item)
    if isinstance(value, contextvars.ContextVar):
        return identity(value.get(None))
    if isinstance(value, types.CellType):
        return identity(value.cell_contents)
    if isinstance(value, dict):
        return [(identity(key), identity(item)) for key, item in value.items()]
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        return [identity(item) for item in value]
    if not hasattr(value, "__dict__"):
        return object()  # an iterator, or what only Dynamo's own names lead to: never the same
    return [(key, identity(item)) for key, item in value.__dict__.items()]


class _Number(int):
    """Stands for a number that the graph computes, until it is known which output it is."""
