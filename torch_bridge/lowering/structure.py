"""Containers of tensors without torch's classes, so that the output of a converted module can pass through jax.jit."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from torch.utils import _pytree as pytree

from jaxtrain.errors import UserError


class Fields(dict):
    """A dataclass's fields, by name: an `Outputs` in JAX. owner: its class."""

    def __init__(self, owner: type, values: Mapping[str, Any]):
        super().__init__(values)
        self.owner = owner


def _from_values(values: Iterable[Any], context: tuple) -> Fields:
    return Fields(context[0], dict(zip(context[1], values, strict=True)))


def _with_keys(fields: Any) -> tuple[list, Any]:
    return [(pytree.MappingKey(name), value) for name, value in fields.items()], (fields.owner, tuple(fields))


pytree.register_pytree_node(
    Fields,
    lambda fields: (list(fields.values()), (fields.owner, tuple(fields))),
    _from_values,
    flatten_with_keys_fn=_with_keys,
)


class Outputs(dict):
    """Dictionary whose entries are attributes too: `outputs.logits`. Stands for Hugging Face's ModelOutput and for
    dataclasses; entries that are None are left out, as in ModelOutput."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{name!r} is not among the outputs: {', '.join(map(str, self))}") from None

    def __getitem__(self, key: Any) -> Any:
        return list(self.values())[key] if isinstance(key, (int, slice)) else super().__getitem__(key)


def _flatten(outputs: Outputs):
    keys = tuple(outputs)
    return [(jax.tree_util.DictKey(key), dict.__getitem__(outputs, key)) for key in keys], keys


jax.tree_util.register_pytree_with_keys(Outputs, _flatten, lambda keys, values: Outputs(zip(keys, values, strict=True)))


class Cache:
    """Stand-in, in torch, for a key-value cache that a recorded forward pass has filled but does not return.

    Raises UserError wherever it is used.
    """

    def __init__(self, kind: str):
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        raise _NoCache(
            f"a compiled forward pass does not return its {vars(self).get('_kind', 'cache')} (asked for {name}): call "
            "the model with use_cache=True to get it, or use model.generate()"
        )

    __getitem__ = __iter__ = __len__ = lambda self, *_: getattr(self, "values")  # noqa: B009


class _NoCache(UserError, AttributeError):
    """UserError that makes `hasattr` return False."""


def is_cache(value: Any) -> bool:
    """Return True for one of transformers' caches, without importing transformers."""
    return any(f"{kind.__module__}.{kind.__name__}" == "transformers.cache_utils.Cache" for kind in type(value).__mro__)


def _is_record(value: Any) -> bool:
    """Return True for an instance of a dataclass that is not a mapping; transformers' outputs are mappings."""
    return dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping))


def with_fields(outputs: Any) -> Any:
    """Return the outputs with dataclasses, at any depth, replaced by Fields, and caches by Cache."""

    def one(value: Any) -> Any:
        if is_cache(value):
            return Cache(type(value).__name__)
        if not _is_record(value):
            return value
        names = [field.name for field in dataclasses.fields(value)]
        return Fields(type(value), {name: with_fields(getattr(value, name)) for name in names})

    return pytree.tree_map(one, outputs, is_leaf=_is_record)


pytree.register_pytree_node(Cache, lambda cache: ([], vars(cache)["_kind"]), lambda _, kind: Cache(kind))


@dataclasses.dataclass(frozen=True)
class Structure:
    """Structure of nested outputs.

    kind: "leaf", "none", "list", "tuple", "dict", "outputs" or a namedtuple class. keys: of a dict or outputs.
    """

    kind: Any
    keys: tuple = ()
    children: tuple["Structure", ...] = ()

    @classmethod
    def of(cls, spec: Any) -> "Structure":
        """Convert torch's TreeSpec."""
        if spec.is_leaf():
            return cls("leaf")
        children = tuple(cls.of(spec.child(index)) for index in range(spec.num_children))
        if spec.type in (list, tuple):
            return cls(spec.type.__name__, (), children)
        if spec.type.__name__ == "namedtuple" or hasattr(spec.context, "_fields"):
            return cls(spec.context, (), children)
        keys = spec.context
        if spec.type is Cache:
            return cls("none")
        if spec.type is Fields:
            return cls("dict", keys[1], children)
        if isinstance(keys, (list, tuple)) and len(keys) != len(children):
            keys = keys[0]  # of a dataclass torch keeps the names of set fields, then of those that are None
        if not isinstance(keys, (list, tuple)) or len(keys) != len(children):
            keys = range(len(children))
        return cls("dict" if issubclass(spec.type, dict) and spec.type is dict else "outputs", tuple(keys), children)

    def build(self, leaves: Sequence[Any]) -> Any:
        """Build the container around the leaves."""
        feed = iter(leaves)
        value = self._build(feed)
        assert next(feed, None) is None
        return value

    def _build(self, feed: Iterator) -> Any:
        if self.kind == "leaf":
            return next(feed)
        if self.kind == "none":
            return None
        values = [child._build(feed) for child in self.children]
        if self.kind in ("list", "tuple"):
            return values if self.kind == "list" else tuple(values)
        if self.kind in ("dict", "outputs"):
            return (dict if self.kind == "dict" else Outputs)(zip(self.keys, values, strict=True))
        return self.kind(*values)
