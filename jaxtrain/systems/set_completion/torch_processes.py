"""torch for scripts that open a process group, with the part that JAX does instead:

    from jaxtrain.systems.set_completion import torch_processes as torch

`torch.distributed` joins, counts and adds over JAX's processes, `torch.cuda.set_device` is accepted (each process takes
its own GPU), everything else is torch's own.
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
    """Join the processes that the launcher names; nothing to do for one. backend: not used, XLA brings its own."""
    launch.setup_distributed()


def all_reduce(tensor: torch.Tensor, op: Any = torch.distributed.ReduceOp.SUM) -> None:
    """The sum over all processes, in place. Raises UserError for another operation."""
    if op != torch.distributed.ReduceOp.SUM:
        raise UserError(
            f"all_reduce: op is {op}, wanted SUM; gather with jax.experimental.multihost_utils and reduce there"
        )
    if jax.process_count() > 1:
        every = np.asarray(multihost_utils.process_allgather(tensor.detach().cpu().numpy()))
        tensor.copy_(torch.from_numpy(every.sum(0)))


def barrier() -> None:
    """Until every process is here."""
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
    """torch.cuda, but for the choice of a device."""

    @staticmethod
    def set_device(device: Any) -> None:
        """Accepted: a process takes the GPU of its number on the machine (docs/launching.md)."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


cuda = _Cuda()


def __getattr__(name: str) -> Any:
    return getattr(torch, name)
