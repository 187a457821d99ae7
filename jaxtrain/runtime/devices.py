"""Describe the accelerators: the devices, the CUDA version, and the number formats of the hardware."""

import re
from typing import Any

import jax
from jax.extend import backend

from jaxtrain.errors import UserError, one_line


def all_devices() -> list[Any]:
    """Return the devices of all processes. Raises UserError if this machine lacks the devices of JAX_PLATFORMS."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # AssertionError if JAX's plugin finds no GPU
        platforms = jax.config.jax_platforms
        if not platforms:
            raise
        why = f" ({one_line(error)})" if str(error) else ""
        raise UserError(
            f"JAX_PLATFORMS={platforms}: JAX finds no such device here{why}; unset JAX_PLATFORMS, or set it to cpu"
        ) from None


def cuda_version() -> str | None:
    """Return the CUDA version that JAX's GPU backend was built for, such as "13.0"; None without a GPU."""
    if jax.default_backend() != "gpu":
        return None
    found = re.search(r"cuda\s+(\d+)", backend.get_backend().platform_version)
    return f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}" if found else None


def formats(capability: str | None) -> dict[str, bool]:
    """Return whether the hardware has TF32 products and bfloat16 (Ampere and later). capability: such as "9.0"."""
    ampere = capability is not None and float(capability) >= 8.0
    return {"TF32": ampere, "bfloat16": ampere}
