"""Detect GPUs without starting JAX."""

import os
import pathlib
import re
from collections.abc import Mapping

from jaxtrain.errors import UserError


def has_gpus() -> bool:
    """Return True if JAX will find NVIDIA GPUs on this machine."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    return "cpu" not in platforms.split(",") and os.path.exists("/dev/nvidiactl")


def share_memory() -> None:
    """Let JAX allocate GPU memory on demand instead of three quarters at its start, because torch uses the same GPU.

    Call it before JAX's first operation; a value of XLA_PYTHON_CLIENT_PREALLOCATE in the environment takes precedence.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[str]:
    """List the GPUs visible to this process, in CUDA's order, as numbers or UUIDs for nvidia-smi's `-i`."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",")]
        end = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))  # CUDA ignores the rest
        return names[:end]
    files = pathlib.Path("/dev").glob("nvidia*")
    return sorted((m[1] for f in files if (m := re.fullmatch(r"nvidia(\d+)", f.name))), key=int)


def gpus_of_process(local: int, locals_: int, visible: int) -> list[int] | None:
    """Choose the GPU of one of several processes on a machine; None: all GPUs visible to it.

    If each process sees one GPU only, the launcher has chosen already (Slurm's --gpus-per-task=1). Raises UserError if
    several processes would have to share a GPU.
    """
    if locals_ == 1 or visible == 1:
        return None
    if local >= visible:
        raise UserError(
            f"launch: process {local} of {locals_} on this machine finds {visible} GPUs, wanted one for each process. "
            "Start as many processes as the machine has GPUs, or one process for all of them"
        )
    return [local]
