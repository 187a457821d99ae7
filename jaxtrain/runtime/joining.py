"""Connect a user's script to the other processes that its launcher started, and start all from process 0's values."""

import hashlib
import itertools
import os
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.runtime import launch
from jaxtrain.runtime.launch import Launch

ALONE = "JAXTRAIN_PROCESSES=1"
_models = itertools.count()  # numbers the models; all processes make them in the same order


def join(config_text: str, environ: Mapping[str, str] = os.environ) -> Launch | None:
    """Connect a script's process to the others that its launcher started, unless it is connected; return the launch,
    None for a single process and for one that is connected already.

    config_text: as in `preflight`, which follows. Raises UserError as `setup_distributed` and `preflight` do.
    """
    if jax.distributed.is_initialized():
        return None
    found = launch.detect(environ)
    in_batch_script = found.launcher == "Slurm" and "SLURM_STEP_NODELIST" not in environ  # srun sets it
    if found.processes == 1 or in_batch_script:
        return None
    try:
        launch.setup_distributed(found)
    except UserError as error:
        raise UserError(f"{error}. A process that shall train alone sets {ALONE}") from None
    launch.preflight(config_text)
    return found


def from_process_zero(tensors: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return process 0's bytes of every tensor; [] if all processes have the same. tensors: uint8 arrays.

    Raises UserError if the processes have tensors of different sizes.
    """
    from jax.experimental import multihost_utils

    sizes = ",".join(str(tensor.size) for tensor in tensors)
    number = next(_models)
    if not launch.agree(f"sizes/{number}", sizes):
        raise UserError("launch: the processes have made models of different sizes; every process runs the same script")
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.tobytes())
    if launch.agree(f"weights/{number}", digest.hexdigest()):
        return []
    return [np.asarray(multihost_utils.broadcast_one_to_all(tensor)) for tensor in tensors]  # one at a time: memory
