"""The accelerators of this process: CUDA's version, and which number formats their hardware computes in."""

import re
from typing import Any

import jax
from jax.extend import backend

from jaxtrain.errors import UserError, one_line


def all_devices() -> list[Any]:
    """Return the devices of all processes. Raises UserError where this machine lacks what JAX_PLATFORMS asks for."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter where the plugin of JAX finds no GPU
        platforms = jax.config.jax_platforms
        if not platforms:
            raise
        why = f" ({one_line(error)})" if str(error) else ""
        raise UserError(
            f"JAX_PLATFORMS={platforms}: JAX finds no such device here{why}; unset JAX_PLATFORMS, or set it to cpu"
        ) from None


def cuda_version() -> str | None:
    """CUDA's version that JAX's GPU backend was built for, as "13.0"; None without a GPU."""
    if jax.default_backend() != "gpu":
        return None
    found = re.search(r"cuda\s+(\d+)", backend.get_backend().platform_version)
    return f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}" if found else None


def formats(capability: str | None) -> dict[str, bool]:
    """By compute capability, as "9.0": whether TF32 products (Ampere and later) and bfloat16 are in the hardware."""
    ampere = capability is not None and float(capability) >= 8.0
    return {"TF32": ampere, "bfloat16": ampere}
