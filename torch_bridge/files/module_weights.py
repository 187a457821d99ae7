"""Weights of a file for a module that has none in torch: one on the meta device, or one that stays as it is."""

import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import ml_dtypes
import numpy as np
import torch

from jaxtrain.errors import UserError
from torch_bridge.files import open_weights
from torch_bridge.lazy_array import LazyArray

FEW = 4  # of the names in a message


def allocate(modules: Iterable[torch.nn.Module]) -> None:
    """Move tensors off the meta device, each as it is tied, into memory that nothing has written to: the system gives
    it to the process at the first write. Raises UserError for a buffer that no file holds."""
    for module in modules:
        for key, tensor in {id(t): (key, t) for key, t in _named(module)}.values():
            if key not in _saved(module):
                raise UserError(
                    f"{key} is on the meta device, and no file of weights holds it, as it is not persistent: make the "
                    "module under accelerate.init_empty_weights(), which computes buffers, or set it"
                )
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            if isinstance(tensor, torch.nn.Parameter):
                empty = torch.nn.Parameter(empty, tensor.requires_grad)
            torch.utils.swap_tensors(tensor, empty)  # the object stays: optimizers hold it


def _named(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    both = (*module.named_parameters(), *module.named_buffers())
    return ((key, tensor) for key, tensor in both if tensor.is_meta)


def _saved(module: torch.nn.Module) -> set[str]:
    """Return the names that the module's state dict has."""
    return set(module.state_dict(keep_vars=True))


def of_file(
    path: str | pathlib.Path,
    modules: Mapping[str, torch.nn.Module],
    tensors: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
) -> dict[str, Callable[[], np.ndarray]]:
    """Return, by name, what reads each parameter and persistent buffer from a file or folder, in the tensor's dtype.

    tensors, aliases: as module_tensors.snapshot returns them. Raises UserError for a missing or unexpected key and for
    another shape; nothing is read before.
    """
    leaves, saved = open_weights(path), set[str]()
    for name, module in modules.items():
        saved |= {("" if len(modules) == 1 else f"{name}.") + key for key in _saved(module)}
    unexpected = [key for key in leaves if key not in saved]
    entries = {aliases.get(key, key): (key, leaf) for key, leaf in leaves.items()}
    missing = [key for key in tensors if key in saved and key not in entries]
    if missing or unexpected:
        raise UserError(
            f"weights: {path}: {len(missing)} keys of the module are missing ({', '.join(missing[:FEW])}), "
            f"{len(unexpected)} are none of its own ({', '.join(unexpected[:FEW])}); wanted the keys of "
            "module.state_dict()"
        )
    for name, (key, leaf) in entries.items():
        if tuple(leaf.shape) != tuple(tensors[name].shape):
            raise UserError(
                f"weights: {path}: {key} is {list(leaf.shape)}, the module wants {list(tensors[name].shape)}"
            )
    return {name: _reader(leaf, tensors[name].dtype) for name, (_, leaf) in entries.items()}


def _reader(leaf: LazyArray, dtype: torch.dtype) -> Callable[[], np.ndarray]:
    name = str(dtype).removeprefix("torch.")
    wanted = np.dtype(getattr(ml_dtypes, name, name))
    return lambda: np.asarray(leaf).astype(wanted, copy=False)
