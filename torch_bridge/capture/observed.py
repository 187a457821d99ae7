"""Compare what operators give while a program is traced with dtypes and shapes as torch has traced them, or refuse.

Where torch raises for some values (an index out of bounds, an assertion, integers divided by zero), the program also
computes whether it would: XLA itself goes on with other numbers.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torch_bridge.lowering.dtypes import category, jax_dtype
from torch_bridge.lowering.errors import NoForm
from torch_bridge.lowering.index_checks import Bounds, bounds_of

_ASSERTS = ("aten._assert_async.msg", "aten._assert_async.default", "aten._assert_scalar.default")
_DIVISIONS = ("aten.div.Tensor_mode", "aten.floor_divide.default", "aten.remainder.Tensor", "aten.fmod.Tensor")


class Observed:
    """Called with each node and its value; returns the value in torch's dtype. conditions: those that must be true, or
    torch raises.

    indices: look at indices, too. Raises NoForm where a lowering gives another shape than torch, or a dtype that holds
    less.
    """

    def __init__(self, module: torch.fx.GraphModule, symbols: Mapping[Any, int], indices: bool):
        self.conditions: list[Any] = []
        self._symbols = symbols
        self._rules: dict[Any, list[Callable[[Any], Any]]] = {}
        for node in module.graph.nodes:
            self._note(node, indices)

    def holds(self) -> Any:
        """Return whether all conditions are true, as an array; None if there are none."""
        return jnp.all(jnp.stack(self.conditions)) if self.conditions else None

    def see(self, node: torch.fx.Node, value: Any) -> None:
        """Compute the conditions that a node's value must fulfil."""
        for rule in self._rules.get(node, ()) if hasattr(value, "dtype") else ():
            with jax.enable_x64(True) if value.dtype == np.int64 else contextlib.nullcontext():
                self.conditions.append(jnp.all(rule(value)))

    def __call__(self, node: torch.fx.Node, value: Any) -> Any:
        self.see(node, value)
        traced = node.meta.get("val")
        if isinstance(traced, (tuple, list)) and isinstance(value, (tuple, list)):
            return type(value)(self._settled(node, *pair) for pair in zip(traced, value, strict=False))
        return self._settled(node, traced, value)

    def _note(self, node: torch.fx.Node, indices: bool) -> None:
        name = str(node.target)
        if name in _ASSERTS:
            if _always_holds(node.args[0]):
                return
            self._rules.setdefault(node.args[0], []).append(lambda value: value != 0)
        elif name in _DIVISIONS and isinstance(node.args[1], torch.fx.Node) and _is_whole(node):
            self._rules.setdefault(node.args[1], []).append(lambda value: value != 0)
        for bounds in bounds_of(node) if indices else ():
            size = concrete(bounds.size, self._symbols)
            if size is not None:
                self._rules.setdefault(bounds.index, []).append(functools.partial(_within, bounds, size))

    def _settled(self, node: torch.fx.Node, wanted: Any, got: Any) -> Any:
        if not isinstance(wanted, torch.Tensor) or not hasattr(got, "dtype"):
            return got
        shape = tuple(concrete(size, self._symbols) for size in wanted.shape)
        if None not in shape and tuple(got.shape) != shape:
            raise NoForm(f"{node.target} gives {tuple(got.shape)} in JAX and {shape} in torch", node.stack_trace)
        dtype = jax_dtype(wanted.dtype)
        if got.dtype == dtype or (wanted.dtype is torch.int64 and got.dtype in (np.int32, np.int64)):
            return got
        if category(dtype) == category(got.dtype) == 2 and got.dtype.itemsize > dtype.itemsize:
            return got.astype(dtype)  # computed in float32, as torch does inside the operator
        raise NoForm(f"{node.target} gives {got.dtype} in JAX and {wanted.dtype} in torch", node.stack_trace)


def concrete(size: Any, symbols: Mapping[Any, int]) -> int | None:
    """Return a size as a number; None if the data decide it. symbols: the values of the symbols in it."""
    size = size.meta["val"] if isinstance(size, torch.fx.Node) else size
    if isinstance(size, int):
        return size
    number = size.node.expr.xreplace(symbols)
    return int(number) if number.is_number else None


def _always_holds(condition: Any) -> bool:
    """Return True for a condition on sizes that torch has proved, such as that a selection has no less than 0 rows."""
    value = condition.meta.get("val") if isinstance(condition, torch.fx.Node) else condition
    return isinstance(value, bool | torch.SymBool) and statically_known_true(value)


def _within(bounds: Bounds, size: int, index: Any) -> Any:
    inside = (index >= (-size if bounds.negative else 0)) & (index < size)
    return inside if bounds.ignored is None else inside | (index == bounds.ignored)


def _is_whole(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())
