"""Connect the processes of a user's script, and start all of them from process 0's weights."""

import os
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxtrain import config_io
from jaxtrain.config import TrainingConfig
from jaxtrain.runtime import joining
from jaxtrain.torch_task import is_torch_module


def join(config: TrainingConfig, model: Any, loss: Any = None) -> None:
    """Connect to the other processes that a launcher started, if this has not been done; give the user's model, and a
    loss module, process 0's weights and buffers, as DistributedDataParallel does.

    Raises UserError if the processes cannot meet, or differ in versions, config or the model's tensors.
    """
    joined = joining.join(config_io.dump(config), os.environ)
    if joined is not None and joined.process == 0 and not config.run.quiet:
        print(joined, flush=True)
    if jax.process_count() == 1 or model is None:
        return
    if is_torch_module(model):
        from torch_bridge import same_tensors

        modules = [model, *([loss] if is_torch_module(loss) else [])]
        same_tensors.replace(modules, joining.from_process_zero(same_tensors.bytes_of(modules)))
    else:
        leaves, structure = jax.tree.flatten(nnx.state(model))
        plain = [i for i, leaf in enumerate(leaves) if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
        arrays = [np.asarray(leaves[i]) for i in plain]
        found = joining.from_process_zero([np.frombuffer(array.tobytes(), np.uint8) for array in arrays])
        for i, array, value in zip(plain, arrays, found, strict=bool(found)):
            leaves[i] = jax.numpy.asarray(np.frombuffer(value.tobytes(), array.dtype).reshape(array.shape))
        nnx.update(model, jax.tree.unflatten(structure, leaves))
