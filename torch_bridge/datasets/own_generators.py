"""Find random generators that a dataset or collate function holds itself; a run neither seeds nor restores them."""

import itertools
import random
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
PROCESS = (torch.default_generator, np.random.random_sample.__self__, random.random.__self__)  # the global ones
LEAVES = (type, types.ModuleType, np.ndarray, torch.Tensor, *KINDS)
DEEPEST = 6
MOST = 4096  # objects visited at most
LISTED = 64  # entries of a list or dict visited at most


def generators_in(value: Any, place: str) -> dict[str, Any]:
    """Return all generators in an object's attributes, lists and dicts, searched recursively, by their path."""
    found: dict[str, Any] = {}
    seen: set[int] = set()

    def visit(value: Any, place: str, depth: int) -> None:
        if isinstance(value, KINDS) and not any(value is own for own in PROCESS):
            found[place] = value
        if isinstance(value, LEAVES) or depth > DEEPEST or id(value) in seen or len(seen) == MOST:
            return
        seen.add(id(value))
        if isinstance(value, (list, tuple, Mapping)):
            entries = value.items() if isinstance(value, Mapping) else enumerate(value)
            for key, inner in itertools.islice(entries, LISTED):
                visit(inner, f"{place}[{key!r}]", depth + 1)
            return
        for name, inner in getattr(value, "__dict__", {}).items():
            visit(inner, f"{place}.{name}", depth + 1)

    visit(value, place, 0)
    return found
