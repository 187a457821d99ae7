"""Connect the processes of a user's script, and start all of them from process 0's weights."""

import hashlib
import itertools
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from jaxtrain import config_io
from jaxtrain.config import TrainingConfig
from jaxtrain.errors import UserError
from jaxtrain.runtime import joining, launch
from jaxtrain.torch_task import is_torch_module

_models = itertools.count()  # numbers the models; all processes make them in the same order


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
        same_tensors.replace(modules, _from_process_zero(same_tensors.bytes_of(modules)))
    else:
        leaves, structure = jax.tree.flatten(nnx.state(model))
        plain = [i for i, leaf in enumerate(leaves) if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
        arrays = [np.asarray(leaves[i]) for i in plain]
        found = _from_process_zero([np.frombuffer(array.tobytes(), np.uint8) for array in arrays])
        for i, array, value in zip(plain, arrays, found, strict=bool(found)):
            leaves[i] = jax.numpy.asarray(np.frombuffer(value.tobytes(), array.dtype).reshape(array.shape))
        nnx.update(model, jax.tree.unflatten(structure, leaves))


def _from_process_zero(tensors: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return process 0's bytes of every tensor; [] if all processes have the same. tensors: uint8 arrays."""
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
