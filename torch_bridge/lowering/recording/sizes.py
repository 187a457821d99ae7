"""Shapes that an exported graph holds for: its symbolic sizes, their ranges, and what the export assumed of them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import sympy
import torch

from torch_bridge.lowering.dtypes import category, jax_dtype


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a graph's inputs. inputs: per input (dtype category, size per axis as int or sympy expression), ("size",
    expression) for a symbolic int, or (None, the Python value)."""

    inputs: tuple[tuple, ...]
    ranges: dict[sympy.Symbol, tuple[Any, Any]]
    assumptions: tuple[Any, ...]

    @classmethod
    def of(cls, program: torch.export.ExportedProgram, names: Sequence[str]) -> "Sizes":
        values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
        inputs, environment = [], None
        for name in names:
            value = values[name]
            if isinstance(value, torch.Tensor):
                shape = []
                for size in value.shape:
                    if isinstance(size, torch.SymInt):
                        environment = size.node.shape_env
                        shape.append(size.node.expr)
                    else:
                        shape.append(int(size))
                inputs.append((category(jax_dtype(value.dtype)), tuple(shape)))
            elif isinstance(value, torch.SymInt):
                environment = value.node.shape_env
                inputs.append(("size", value.node.expr))
            else:
                inputs.append((None, value))
        return cls._assumed(tuple(inputs), program.range_constraints, environment)

    @classmethod
    def of_environment(cls, inputs: tuple[tuple, ...], environment: Any) -> "Sizes":
        """Return the sizes of a graph of Dynamo's. environment: where torch keeps its symbols; None if it has none."""
        return cls._assumed(inputs, environment.var_to_range if environment else {}, environment)

    @classmethod
    def _assumed(cls, inputs: tuple[tuple, ...], bounds: Any, environment: Any) -> "Sizes":
        ranges = {symbol: (bound.lower, bound.upper) for symbol, bound in bounds.items()}
        guards = [environment.replace(guard.expr) for guard in environment.guards] if environment else []
        return cls(inputs, ranges, tuple(guard for guard in guards if guard.free_symbols))

    def symbols(self, inputs: Sequence[Any]) -> dict[sympy.Symbol, int]:
        """Return the values that the symbolic sizes have for these inputs."""
        bound: dict[sympy.Symbol, int] = {}
        for (kind, wanted), value in zip(self.inputs, inputs, strict=True):
            if kind is not None:
                pairs = [(wanted, value)] if kind == "size" else zip(wanted, value.shape, strict=True)
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
                    return f"input {number} is {value!r}, recorded as {wanted!r}"
                continue
            if kind == "size":
                pairs = [(wanted, value)]
            else:
                if not hasattr(value, "shape") or len(value.shape) != len(wanted):
                    return f"input {number} has shape {getattr(value, 'shape', None)}, recorded with {len(wanted)} axes"
                if category(jnp.dtype(value.dtype)) != kind:
                    return f"input {number} holds {value.dtype}"
                pairs = list(zip(wanted, value.shape, strict=True))
            for size, given in pairs:
                if isinstance(size, sympy.Symbol):
                    if bound.setdefault(size, given) != given:
                        return f"input {number} has size {given} where another has {bound[size]}"
                else:
                    later.append((number, size, given))
        for number, size, given in later:
            if (size.subs(list(bound.items())) if isinstance(size, sympy.Expr) else size) != given:
                return f"input {number} has size {given}, recorded as {size}"
        for symbol, given in bound.items():
            low, high = self.ranges.get(symbol, (0, sympy.oo))
            if not low <= given <= high:
                return f"a size of {given} lies outside [{low}, {high}]"
        for assumption in self.assumptions:
            if assumption.free_symbols <= bound.keys() and not bool(assumption.subs(list(bound.items()))):
                return f"the record assumes {assumption}"
        return None


def any_size(leaf: Any) -> dict | None:
    """Return an input's free axes: all of tokens, features and sound; only the batch of images and volumes, because
    arithmetic on symbolic heights and widths can take torch minutes (other image sizes are recorded anew)."""
    if not isinstance(leaf, torch.Tensor):
        return None
    return dict.fromkeys(range(leaf.dim() if leaf.dim() < 4 else 1), torch.export.Dim.AUTO)


def symbols_stood_in_the_way(error: Exception) -> bool:
    """Return True if Python needed a size as a plain number, for example as a dict key: then fixed sizes are recorded,
    and other sizes anew."""
    return "SymInt" in str(error) or "symbolic" in str(error)
