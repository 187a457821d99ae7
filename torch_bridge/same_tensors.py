"""Read and replace all tensors of torch modules as bytes, to send them between processes."""

from collections.abc import Sequence

import numpy as np
import torch


def bytes_of(modules: Sequence[torch.nn.Module]) -> list[np.ndarray]:
    """Return every parameter's and buffer's content as uint8 arrays, in a fixed order; a shared one once."""
    return [_bytes(tensor).numpy() for tensor in _tensors(modules)]


def replace(modules: Sequence[torch.nn.Module], contents: Sequence[np.ndarray]) -> None:
    """Write contents, in the order of `bytes_of`, into the tensors; does nothing for []."""
    with torch.no_grad():
        for tensor, content in zip(_tensors(modules), contents, strict=bool(contents)):
            if tensor.numel():
                tensor.copy_(torch.from_numpy(np.array(content)).view(tensor.dtype).view(tensor.shape))


def _tensors(modules: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    found = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    return list({id(tensor): tensor for tensor in found}.values())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
