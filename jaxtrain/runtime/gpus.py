"""Detect GPUs without starting JAX."""

import os


def has_gpus() -> bool:
    """Return True if JAX will find NVIDIA GPUs on this machine."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    return "cpu" not in platforms.split(",") and os.path.exists("/dev/nvidiactl")
