"""Tensors and JAX arrays by their memory: no copy on the way in, a tensor of its own on the way out."""

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import torch

from jaxtrain.errors import UserError


def any_wide(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether float64 tensors are among them, which JAX must compute in 64 bits."""
    return any(tensor.dtype is torch.float64 for tensor in tensors)


def precision(wide: bool):
    """Return the context in which JAX computes: 64 bits if `wide`."""
    return jax.enable_x64(True) if wide else contextlib.nullcontext()


def to_array(tensor: torch.Tensor) -> jax.Array:
    """Return the tensor's memory as an array; int64 becomes int32 where JAX computes in 32 bits.

    Raises UserError for integers that 32 bits cannot hold.
    """
    tensor = tensor.detach().contiguous()
    if tensor.dtype is torch.int64 and not jax.config.jax_enable_x64:
        narrow = tensor.to(torch.int32)
        if not torch.equal(narrow.to(torch.int64), tensor):
            raise UserError(
                f"an int64 tensor of shape {tuple(tensor.shape)} holds values from {tensor.min()} to {tensor.max()}, "
                "and JAX computes with 32-bit integers here. Map the ids to a smaller range, or call "
                "jax.config.update('jax_enable_x64', True) first"
            )
        tensor = narrow
    try:
        return jax.dlpack.from_dlpack(tensor)
    except (RuntimeError, ValueError, TypeError, BufferError) as error:
        platforms = ", ".join(sorted({device.platform for device in jax.devices()} | {"cpu"}))
        raise UserError(
            f"a {tensor.dtype} tensor on {tensor.device} cannot go to JAX, which has {platforms} here: {error}. Move "
            "the module and its inputs with .to('cpu'), or install jax for that device"
        ) from None


def to_tensor(array: jax.Array, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The array as a tensor of its own, which torch may write to; int32 becomes int64, torch's integer."""
    tensor = torch.from_dlpack(array)
    wanted = dtype or (torch.int64 if tensor.dtype is torch.int32 else tensor.dtype)
    return tensor.clone() if tensor.dtype is wanted else tensor.to(wanted)


@functools.cache
def pull_back() -> Callable[[Any, Any], Any]:
    """Return the compiled backward pass: (pullback of jax.vjp, cotangents) -> gradients."""
    return jax.jit(lambda pullback, cotangents: pullback(cotangents)[0])
