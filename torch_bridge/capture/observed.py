"""What a graph's operators give while a program is traced: dtypes and shapes as torch has traced them, or a refusal."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from torch_bridge.lowering.dtypes import jax_dtype
from torch_bridge.lowering.errors import NoForm

_ASSERTS = ("aten._assert_async.msg", "aten._assert_async.default", "aten._assert_scalar.default")


class Observed:
    """Called with each node and its value. asserted: conditions that torch asserts, for the host to look at.

    Raises NoForm where a lowering gives another dtype or shape than torch.
    """

    def __init__(self, module: torch.fx.GraphModule, symbols: Mapping[Any, int]):
        self.asserted: list[Any] = []
        self._symbols = symbols
        asserts = [node for node in module.graph.nodes if str(node.target) in _ASSERTS]
        self._conditions = {node.args[0] for node in asserts if isinstance(node.args[0], torch.fx.Node)}

    def __call__(self, node: torch.fx.Node, value: Any) -> None:
        if node in self._conditions and hasattr(value, "dtype"):
            self.asserted.append(jnp.all(value != 0))
        traced = node.meta.get("val")
        several = isinstance(traced, (tuple, list)) and isinstance(value, (tuple, list))
        for wanted, got in zip(traced, value, strict=False) if several else ((traced, value),):
            if isinstance(wanted, torch.Tensor) and hasattr(got, "dtype"):
                self._compare(node, wanted, got)

    def _compare(self, node: torch.fx.Node, wanted: torch.Tensor, got: Any) -> None:
        dtype = jax_dtype(wanted.dtype)
        if got.dtype != dtype and not (wanted.dtype is torch.int64 and got.dtype == np.int64):
            reason = f"{node.target} gives {got.dtype} in JAX and {wanted.dtype} in torch"
            raise NoForm(reason, node.stack_trace)
        if any(isinstance(size, torch.SymInt) and not _is_known(size, self._symbols) for size in wanted.shape):
            return  # the data decide
        shape = tuple(concrete(size, self._symbols) for size in wanted.shape)
        if tuple(got.shape) != shape:
            raise NoForm(f"{node.target} gives {tuple(got.shape)} in JAX and {shape} in torch", node.stack_trace)


def concrete(size: Any, symbols: Mapping[Any, int]) -> int:
    """Return a size as a number. symbols: the values of the symbols in it."""
    return size if isinstance(size, int) else int(size.node.expr.xreplace(symbols))


def _is_known(size: torch.SymInt, symbols: Mapping[Any, int]) -> bool:
    return size.node.expr.free_symbols <= symbols.keys()
