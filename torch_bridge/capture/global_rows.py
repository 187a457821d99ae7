"""The batch that several processes share: each holds some of its rows, and torch captures the loss of them all.

A graph holds the number of rows in sizes and divisors. So Dynamo is shown tensors of the global batch's shape; the
program gets this process's rows in their place.
"""

import copy
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from jaxtrain.errors import UserError
from jaxtrain.runtime.lockstep import digest
from torch_bridge.batch_tensors import tensors_in
from torch_bridge.datasets import to_torch


class GlobalRows:
    """Stand-ins for the tensors of one batch. processes: that hold as many rows each. rows: that this one holds."""

    def __init__(self, processes: int):
        self._processes = processes
        self._here: dict[int, torch.Tensor] = {}  # by the stand-in's address
        self._held: list[torch.Tensor] = []  # the stand-ins: an address is theirs as long as they live
        self.rows = 0

    def widened(self, batch: Any) -> Any:
        """Return the batch with stand-ins for all tensors that have its rows: those whose first axis is as long as that
        of the first tensor that has axes. Raises UserError for a batch without rows, and for tensors inside objects."""
        self._here, self._held = {}, []
        lengths = [value.shape[0] for value in tensors_in(batch, (torch.Tensor, np.ndarray)) if value.ndim]
        if not lengths:
            raise UserError("the batch has no tensor with rows, and each process's rows are its part of the batch")
        self.rows = lengths[0]
        return self._widened(batch)

    def here(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return this process's rows of a tensor that the loss reads; None for one that all processes hold whole."""
        return self._here.get(tensor.data_ptr()) if tensor.dim() else None

    def _widened(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor | np.ndarray):
            return self._stand_in(value) if value.ndim and value.shape[0] == self.rows else value
        if isinstance(value, Mapping):
            wide = copy.copy(value)
            for key, item in value.items():
                wide[key] = self._widened(item)  # type: ignore[index]
            return wide
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self._widened, value))
        if isinstance(value, list | tuple):
            return type(value)(map(self._widened, value))
        if next(tensors_in(value, (torch.Tensor, np.ndarray)), None) is not None:
            raise UserError(
                f"the batch holds tensors in a {type(value).__name__}, and over several processes their rows are put "
                "together: hand over tensors in dicts, lists and tuples"
            )
        return value

    def _stand_in(self, value: Any) -> torch.Tensor:
        tensor = value if isinstance(value, torch.Tensor) else to_torch(value)
        shape = (self._processes * tensor.shape[0], *tensor.shape[1:])
        if tensor.dtype in (torch.float32, torch.float16, torch.bfloat16):  # checks on the host read other dtypes alone
            wide = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        else:
            wide = tensor.detach().repeat(self._processes, *[1] * (tensor.dim() - 1))
        if wide.numel():
            self._here[wide.data_ptr()] = tensor
        self._held.append(wide)
        return wide.requires_grad_(tensor.requires_grad)


def operators(graph: torch.fx.Graph, options: Any) -> str:
    """Return a number that differs for graphs of different operators, or with other options, as text."""
    nodes = [f"{node.op} {node.target} {node.args} {node.kwargs}" for node in graph.nodes]
    text = re.sub(r"cuda:\d+|index=\d+", "cuda", " ".join([*nodes, _ordered(options)]))  # a process's GPU
    return digest(np.frombuffer(text.encode(), np.uint8))


def _ordered(value: Any) -> str:
    """Return a value as text that is the same in every process: sets have no order."""
    if isinstance(value, frozenset | set):
        return str(sorted(map(_ordered, value)))
    return str([*map(_ordered, value)]) if isinstance(value, list | tuple) else str(value)
