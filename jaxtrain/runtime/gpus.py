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
    """Let JAX take a GPU's memory as it needs it, where torch computes on the same one, and not three quarters at its
    start. To be called before JAX's first operation; XLA_PYTHON_CLIENT_PREALLOCATE wins."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Name the GPUs that CUDA shows this process, in its order, as nvidia-smi's `-i` takes them: numbers or UUIDs."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",")]
        end = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))  # CUDA reads no further
        return names[:end]
    files = pathlib.Path("/dev").glob("nvidia*")
    return sorted((m[1] for f in files if (m := re.fullmatch(r"nvidia(\d+)", f.name))), key=int)


def gpus_of_process(local: int, locals_: int, visible: int) -> list[int] | None:
    """Choose the GPU of one of several processes on a machine; None: all that it sees.

    A launcher that shows each process one GPU (Slurm's --gpus-per-task=1) has chosen already. Raises UserError where
    several processes would have to share.
    """
    if locals_ == 1 or visible == 1:
        return None
    if local >= visible:
        raise UserError(
            f"launch: process {local} of {locals_} on this machine finds {visible} GPUs, wanted one for each process. "
            "Start as many processes as the machine has GPUs, or one process for all of them"
        )
    return [local]
