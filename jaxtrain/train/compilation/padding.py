"""Find out if a loss depends on how far its batch is padded."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.data.batch_shapes import BatchShapes, flatten, ladder, replaced
from jaxtrain.task import Batch, Task
from jaxtrain.train.state import ModelDef, TrainState

LOSS, GRADIENT = 1e-5, 1e-4  # relative differences that rounding explains


def dependence(
    task: Task, config: Any, model_def: ModelDef, state: TrainState, batch: Batch, shapes: BatchShapes
) -> str | None:
    """How loss and gradients of a batch differ from those of the same batch padded further; None where they do not.

    batch: a few rows, in numpy. Everything in evaluation mode and at full precision, so that dropout plays no part.
    """
    arrays = flatten(batch)
    lengths = shapes.lengths(arrays)
    further = shapes.within(arrays, lengths, tuple(ladder(length + 1) for length in lengths))
    if further == lengths:
        return None  # the model takes nothing longer

    def value(params: Any, rows: Batch) -> Any:
        model = model_def.merge(params, state.frozen, state.buffers)
        return task.loss(model, rows, config, None).value.astype(jnp.float32)

    with jax.default_matmul_precision("highest"):
        compute = jax.jit(jax.value_and_grad(value))
        plain, padded = (
            jax.device_get(compute(state.params, jax.tree.map(np.asarray, rows)))
            for rows in (batch, replaced(batch, shapes.padded(arrays, further)))
        )
    before, after = float(plain[0]), float(padded[0])
    if not abs(before - after) <= LOSS * max(abs(before), 1e-3):
        return f"the loss of a batch is {before:.6g} at length {_told(lengths)} and {after:.6g} at {_told(further)}"
    largest = max((float(np.abs(grad).max(initial=0)) for grad in plain[1].values()), default=0.0)
    for key, grad in plain[1].items():
        error = float(np.abs(grad - padded[1][key]).max(initial=0))
        if not error <= GRADIENT * max(largest, 1e-6):
            return f"the gradient of {key} differs by {error:.2g} between length {_told(lengths)} and {_told(further)}"
    return None


def _told(lengths: tuple[int, ...]) -> str:
    return " and ".join(map(str, lengths))
