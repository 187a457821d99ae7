"""The tensors of a batch, wherever its containers and objects hold them."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

DEEPEST = 6  # of objects nested in a batch


def tensors_in(value: Any, kinds: tuple = (torch.Tensor,), depth: int = 0) -> Iterator[Any]:
    """Yield the tensors of a batch, in containers and in attributes of objects."""
    if issubclass(type(value), kinds):
        yield value
    elif depth < DEEPEST:
        inner = value.values() if type(value) is dict else value if type(value) in (list, tuple) else _attributes(value)
        for item in inner:
            yield from tensors_in(item, kinds, depth + 1)


def _attributes(value: Any) -> list[Any]:
    try:
        return list((value if isinstance(value, Mapping) else vars(value)).values())
    except Exception:  # an object without attributes, or one that raises when it is looked at
        return []
