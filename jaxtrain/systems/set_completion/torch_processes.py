"""Replacement of torch for scripts that open a process group, with torch.distributed on JAX's processes:

    from jaxtrain.systems.set_completion import torch_processes as torch

`torch.distributed` uses JAX's processes, `torch.cuda.set_device` does nothing (each process takes its own GPU), and
everything else is torch's own.
"""

import types
from typing import Any

import jax
import numpy as np
import torch
from jax.experimental import multihost_utils

from jaxtrain.errors import UserError
from jaxtrain.runtime import launch


def init_process_group(backend: str | None = None, **options: Any) -> None:
    """Join the launcher's processes; does nothing for a single one. backend: not used, XLA has its own."""
    launch.setup_distributed()


def all_reduce(tensor: torch.Tensor, op: Any = torch.distributed.ReduceOp.SUM) -> None:
    """Sum the tensor over all processes, in place. Raises UserError for another operation."""
    if op != torch.distributed.ReduceOp.SUM:
        raise UserError(
            f"all_reduce: op is {op}, wanted SUM; gather with jax.experimental.multihost_utils and reduce there"
        )
    if jax.process_count() > 1:
        every = np.asarray(multihost_utils.process_allgather(tensor.detach().cpu().numpy()))
        tensor.copy_(torch.from_numpy(every.sum(0)))


def barrier() -> None:
    """Wait until every process has reached the barrier."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("torch.distributed.barrier")


distributed = types.SimpleNamespace(
    init_process_group=init_process_group,
    destroy_process_group=launch.cleanup_distributed,
    all_reduce=all_reduce,
    barrier=barrier,
    get_rank=jax.process_index,
    get_world_size=jax.process_count,
    is_initialized=jax.distributed.is_initialized,
    is_available=lambda: True,
    ReduceOp=torch.distributed.ReduceOp,
)


class _Cuda:
    """torch.cuda, except that set_device does nothing."""

    @staticmethod
    def set_device(device: Any) -> None:
        """Do nothing: a process takes the GPU of its local rank (docs/launching.md)."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


cuda = _Cuda()


def __getattr__(name: str) -> Any:
    return getattr(torch, name)
