"""Shapes that a graph holds for: its symbolic sizes, their ranges, and what the capture assumed of them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import sympy
import torch

from torch_bridge.lowering.dtypes import category


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a graph's inputs. inputs: per input (dtype category, size per axis as int or sympy expression), or
    (None, the Python value)."""

    inputs: tuple[tuple, ...]
    ranges: dict[sympy.Symbol, tuple[Any, Any]]
    assumptions: tuple[Any, ...]

    def symbols(self, inputs: Sequence[Any]) -> dict[sympy.Symbol, int]:
        """Return the values that the symbolic sizes have for these inputs."""
        bound: dict[sympy.Symbol, int] = {}
        for (kind, wanted), value in zip(self.inputs, inputs, strict=True):
            if kind is not None:
                pairs = zip(wanted, value.shape, strict=True)
                bound.update({size: int(given) for size, given in pairs if isinstance(size, sympy.Symbol)})
        return bound

    def refusal(self, inputs: Sequence[Any]) -> str | None:
        """Return why the graph does not hold for these inputs; None if it does."""
        bound: dict[sympy.Symbol, int] = {}
        later = []
        for number, ((kind, wanted), value) in enumerate(zip(self.inputs, inputs, strict=True)):
            if kind is None:
                if isinstance(wanted, (torch.Tensor, type(None))) and value is None:
                    continue
                if type(value) is not type(wanted) or value != wanted:
                    return f"input {number} is {value!r}, captured as {wanted!r}"
                continue
            if not hasattr(value, "shape") or len(value.shape) != len(wanted):
                return f"input {number} has shape {getattr(value, 'shape', None)}, captured with {len(wanted)} axes"
            if category(jnp.dtype(value.dtype)) != kind:
                return f"input {number} holds {value.dtype}"
            for size, given in zip(wanted, value.shape, strict=True):
                if isinstance(size, sympy.Symbol):
                    if bound.setdefault(size, given) != given:
                        return f"input {number} has size {given} where another has {bound[size]}"
                else:
                    later.append((number, size, given))
        for number, size, given in later:
            if (size.subs(list(bound.items())) if isinstance(size, sympy.Expr) else size) != given:
                return f"input {number} has size {given}, captured as {size}"
        for symbol, given in bound.items():
            low, high = self.ranges.get(symbol, (0, sympy.oo))
            if not low <= given <= high:
                return f"a size of {given} lies outside [{low}, {high}]"
        for assumption in self.assumptions:
            if assumption.free_symbols <= bound.keys() and not bool(assumption.subs(list(bound.items()))):
                return f"the graph assumes {assumption}"
        return None
