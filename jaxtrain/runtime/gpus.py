"""Whether this machine has GPUs, asked without starting JAX."""

import os


def has_gpus() -> bool:
    """Whether JAX will find NVIDIA GPUs here."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    return "cpu" not in platforms.split(",") and os.path.exists("/dev/nvidiactl")
