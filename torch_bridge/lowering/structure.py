"""Containers of tensors without torch's classes: what a converted module returns can pass through jax.jit."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from torch.utils import _pytree as pytree

from jaxtrain.errors import UserError
from torch_bridge.lowering.recording.objects import Fields


class Outputs(dict):
    """A dictionary whose entries are attributes too: `outputs.logits`. Stands for Hugging Face's ModelOutput and for
    dataclasses; entries that are None are left out, as there."""

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
    """Stands in torch for the cache of keys and values that a recorded forward pass has filled and that is no output.

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
    """`hasattr` says no."""


def is_cache(value: Any) -> bool:
    """Tell whether it is one of transformers' caches, without an import of transformers."""
    return any(f"{kind.__module__}.{kind.__name__}" == "transformers.cache_utils.Cache" for kind in type(value).__mro__)


def _is_record(value: Any) -> bool:
    """Tell whether it is a dataclass that torch has no name for; transformers' outputs are mappings."""
    return dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping))


def with_fields(outputs: Any) -> Any:
    """Outputs whose dataclasses, at any depth, are Fields, and whose caches are Cache."""

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
    """kind: "leaf", "none", "list", "tuple", "dict", "outputs" or a namedtuple class. keys: of a dict or outputs."""

    kind: Any
    keys: tuple = ()
    children: tuple["Structure", ...] = ()

    @classmethod
    def of(cls, spec: Any) -> "Structure":
        """From torch's TreeSpec."""
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
            keys = keys[
                0
            ]  # torch's context of a dataclass: names of the fields that are there, and of those that are None
        if not isinstance(keys, (list, tuple)) or len(keys) != len(children):
            keys = range(len(children))
        return cls("dict" if issubclass(spec.type, dict) and spec.type is dict else "outputs", tuple(keys), children)

    def build(self, leaves: Sequence[Any]) -> Any:
        """The container around the leaves."""
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
