"""Arguments of a loss: DistributedDataParallel stays around a module, as torch runs such a loss itself."""

from collections.abc import Mapping

import torch
from torch.nn.parallel import DistributedDataParallel

from torch_bridge.from_torch import unwrapped


def arguments_of(modules: Mapping[str, torch.nn.Module]) -> tuple[torch.nn.Module, ...]:
    """Return the objects to pass to a loss function for these modules: without torch.compile and DataParallel, whose
    work XLA does."""
    return tuple(_wrapper(module) or unwrapped(module) for module in modules.values())


def are_replicas(arguments: tuple[torch.nn.Module, ...]) -> bool:
    """Return True if torch exchanges gradients and buffers of one of these modules between processes."""
    return any(isinstance(module, DistributedDataParallel) for module in arguments)


def _wrapper(module: torch.nn.Module) -> DistributedDataParallel | None:
    """Return the DistributedDataParallel among a module's wrappers, or None."""
    while not isinstance(module, DistributedDataParallel):
        if isinstance(module, torch._dynamo.OptimizedModule):
            module = module._orig_mod
        elif isinstance(module, torch.nn.DataParallel):
            module = module.module
        else:
            return None
    return module
