"""Connect a user's script to the other processes that its launcher started."""

import os
from collections.abc import Mapping

import jax

from jaxtrain.errors import UserError
from jaxtrain.runtime import launch
from jaxtrain.runtime.launch import Launch

ALONE = "JAXTRAIN_PROCESSES=1"


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
