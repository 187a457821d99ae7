"""Convert objects of a user's classes to containers of tensors for recording, and back to objects for torch code."""

import dataclasses
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch.utils import _pytree as pytree

DEEPEST = 4  # of objects nested in objects
_NO_BATCH = (torch.nn.Module, torch.utils.data.Dataset, torch.optim.Optimizer, type)  # never taken apart
_EXPORTED = (torch.Tensor, np.ndarray, bool, int, float, str)  # what torch.export takes as an input


class Fields(dict):
    """State of an object, such as a dataclass's fields: a dict in JAX, the object again in torch."""

    def __init__(self, owner: type, values: Mapping[str, Any]):
        super().__init__(values)
        self.owner = owner

    def record(self, above: tuple = ()) -> Any:
        """Make the object without running `__init__` or `__post_init__` again, whose results the state holds."""
        record: Any = cast(Any, self.owner).__new__(self.owner)
        state = {name: put_together(value, (*above, record)) for name, value in self.items()}
        if hasattr(self.owner, "__setstate__") and not dataclasses.is_dataclass(self.owner):
            record.__setstate__(state)
        else:
            for name, value in state.items():
                object.__setattr__(record, name, value)
        return record


@dataclasses.dataclass(frozen=True)
class Constant:
    """A value that is not an input: it is compared, not recorded."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Above:
    """Reference to an enclosing object. levels: 0 for the innermost. weak: it is a weakref."""

    levels: int
    weak: bool


def put_together(tree: Any, above: tuple = ()) -> Any:
    """Return the tree with its objects in place of their Fields."""

    def one(value: Any) -> Any:
        if isinstance(value, Fields):
            return value.record(above)
        if isinstance(value, Above):
            return weakref.ref(above[-1 - value.levels]) if value.weak else above[-1 - value.levels]
        return value.value if isinstance(value, Constant) else value

    return pytree.tree_map(one, tree, is_leaf=lambda value: isinstance(value, (Fields, Above, Constant)))


def take_apart(batch: Any) -> Any:
    """Replace objects of plain Python classes that hold tensors or arrays by Fields, at any depth of the batch.

    Objects that `copy.copy` would not rebuild from their `__dict__` and slots stay as they are.
    """
    return batch if all(map(_is_exported, pytree.tree_leaves(batch))) else _apart(batch, ())


def mapping_of(kind: Any, entries: Mapping) -> Any:
    """Make a mapping of this class, whose constructor takes entries (UserDict) or which is filled later
    (defaultdict)."""
    try:
        return kind(entries)
    except TypeError:
        made = kind()
        made.update(entries)
        return made


class Contents:
    """Snapshot of the values that containers and objects hold."""

    def __init__(self, tree: Any):
        self._tree = tree
        self._before = pytree.tree_flatten(take_apart(tree))

    def written(self) -> bool:
        """Return True if a value was put in since."""
        known = set(map(id, self._before[0]))
        return any(id(leaf) not in known for leaf in pytree.tree_leaves(take_apart(self._tree)))

    def changed(self) -> bool:
        """Return True if a value was put in, taken out or moved since."""
        (before, spec), (after, new) = self._before, pytree.tree_flatten(take_apart(self._tree))
        return spec != new or any(old is not leaf for old, leaf in zip(before, after, strict=True))


def listed(tree: Any) -> Any:
    """Return the tree with every object taken apart as a list, as torch.export wants the sizes of inputs."""
    one = lambda node: [listed(inner) for inner in node.values()] if isinstance(node, Fields) else []
    apart = lambda node: isinstance(node, (Fields, Above, Constant))
    return pytree.tree_map(lambda node: one(node) if apart(node) else node, tree, is_leaf=apart)


def _apart(tree: Any, above: tuple) -> Any:
    """Take apart the objects of a tree. above: the enclosing objects, the outermost first."""
    return pytree.tree_map(lambda leaf: leaf if _is_exported(leaf) else _one(leaf, above), tree)


def _is_exported(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, _EXPORTED) or has_shape(leaf)


def has_shape(leaf: Any) -> bool:
    """Return True for an array of any library. An object that raises when it is asked is none."""
    try:
        return hasattr(leaf, "shape")
    except Exception:
        return False


def _one(leaf: Any, above: tuple) -> Any:
    given = leaf() if isinstance(leaf, weakref.ref) else leaf
    for levels, owner in enumerate(reversed(above)):
        if given is owner:
            return Above(levels, given is not leaf)
    state = _state(leaf) if len(above) < DEEPEST else None
    if state is not None:
        inner = {name: _apart(value, (*above, leaf)) for name, value in state.items()}
        if any(has_shape(value) for value in pytree.tree_leaves(inner)):
            return Fields(type(leaf), inner)
    return Constant(leaf) if above and type(leaf).__hash__ is not None else leaf


def _state(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object; None if it is no plain object, or raises when it is asked."""
    try:
        return _attributes(value)
    except Exception:
        return None


def _attributes(value: Any) -> dict[str, Any] | None:
    kind = type(value)
    if isinstance(value, types.SimpleNamespace):
        return dict(vars(value))
    if kind.__new__ is not object.__new__ or isinstance(value, _NO_BATCH):
        return None
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)} | getattr(value, "__dict__", {})
    state = value.__getstate__()
    parts = state if isinstance(state, tuple) else (state,)  # with slots: (its dict, its slots)
    if not all(part is None or isinstance(part, dict) for part in parts):
        return None
    return {name: inner for part in parts for name, inner in (part or {}).items()}


def _register(kind: type, flatten: Callable, build: Callable) -> None:
    def with_keys(node: Any) -> tuple[list, Any]:
        values, context = flatten(node)
        return [(pytree.MappingKey(name), value) for name, value in zip(_names(context), values, strict=True)], context

    pytree.register_pytree_node(kind, flatten, build, flatten_with_keys_fn=with_keys)


def _names(context: Any) -> Iterator[str]:
    return iter(context[1] if isinstance(context, tuple) else ())


_register(
    Fields,
    lambda fields: (list(fields.values()), (fields.owner, tuple(fields))),
    lambda values, context: Fields(context[0], dict(zip(context[1], values, strict=True))),
)
for _kind in (Constant, Above):
    _register(_kind, lambda node: ([], node), lambda _, node: node)
