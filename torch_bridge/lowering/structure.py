"""Containers of tensors without torch's classes: what a converted module returns can pass through jax.jit."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax


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


@dataclasses.dataclass(frozen=True)
class Structure:
    """kind: "leaf", "list", "tuple", "dict", "outputs" or a namedtuple class. keys: of a dict or outputs."""

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
        values = [child._build(feed) for child in self.children]
        if self.kind in ("list", "tuple"):
            return values if self.kind == "list" else tuple(values)
        if self.kind in ("dict", "outputs"):
            return (dict if self.kind == "dict" else Outputs)(zip(self.keys, values, strict=True))
        return self.kind(*values)
