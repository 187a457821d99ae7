"""What a graph's operators give while a program is traced: dtypes and shapes as torch has traced them, or a refusal."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from torch_bridge.lowering.dtypes import category, jax_dtype
from torch_bridge.lowering.errors import NoForm

_ASSERTS = ("aten._assert_async.msg", "aten._assert_async.default", "aten._assert_scalar.default")


class Observed:
    """Called with each node and its value; returns the value in torch's dtype. asserted: conditions that torch asserts,
    for the host to look at.

    Raises NoForm where a lowering gives another shape than torch, or a dtype that holds less.
    """

    def __init__(self, module: torch.fx.GraphModule, symbols: Mapping[Any, int]):
        self.asserted: list[Any] = []
        self._symbols = symbols
        asserts = [node for node in module.graph.nodes if str(node.target) in _ASSERTS]
        self._conditions = {node.args[0] for node in asserts if isinstance(node.args[0], torch.fx.Node)}

    def __call__(self, node: torch.fx.Node, value: Any) -> Any:
        if node in self._conditions and hasattr(value, "dtype"):
            self.asserted.append(jnp.all(value != 0))
        traced = node.meta.get("val")
        if isinstance(traced, (tuple, list)) and isinstance(value, (tuple, list)):
            return type(value)(self._settled(node, *pair) for pair in zip(traced, value, strict=False))
        return self._settled(node, traced, value)

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
    if isinstance(size, int):
        return size
    number = size.node.expr.xreplace(symbols)
    return int(number) if number.is_number else None
