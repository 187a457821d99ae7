"""Hide the traceback that JAX's CUDA plugin logs on a machine without an NVIDIA GPU, where the `plan` extra is enough.

Source: jax/_src/xla_bridge.py, discover_pjrt_plugins, which logs every exception of a plugin's initialize().
"""

import logging
import os
import pathlib

GPU_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/nvmap")  # Linux, containers, WSL, Jetson


def hide_where_no_gpu_is() -> None:
    """Filter JAX's log from now on. Does not import JAX."""
    logging.getLogger("jax._src.xla_bridge").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for an error of the CUDA plugin, unless there is a GPU or JAX_PLATFORMS asks for one."""
    message = record.getMessage()
    if not (message.startswith("Jax plugin configuration error") and "xla_cuda" in message):
        return True
    asked = os.environ.get("JAX_PLATFORMS", "").lower()
    return "cuda" in asked or "gpu" in asked or any(pathlib.Path(name).exists() for name in GPU_FILES)
