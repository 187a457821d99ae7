"""Choose how batches of many lengths are compiled, and check if the loss depends on how far a batch is padded."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.data import row_keys
from jaxtrain.data.batch_shapes import MOST_SIZES, BatchShapes, flatten, ladder, replaced
from jaxtrain.data.loader import Loader
from jaxtrain.task import Batch, Task
from jaxtrain.train.step.state import ModelDef, TrainState
from torch_bridge.lazy_array import to_host

LOSS, GRADIENT = 1e-5, 1e-4  # largest relative differences due to rounding


def choose(program: Any, split: str, loader: Loader) -> BatchShapes | None:
    """Return how to pad batches of many lengths to few shapes, or to keep each shape; None if all have one shape.

    program: a Program. The choice is recorded in its data: in `pads`, and in `notes` for the run's log.
    """
    data, task = program.data, program.task
    axes = data.find_axes(split, loader)
    if axes == []:
        return None
    exact = axes is None or not data.pads or program.config.data.shapes == "exact"
    exact |= split != "train" and program.metrics is not None  # user metrics expect batches as collated
    fits = lambda rows: task.fits(rows, program.config)
    stream = loader.stream
    length = stream.steps_per_epoch or 1 << 40
    shapes = BatchShapes(axes or [], stream.batch_size, length, fits, once=split != "train", exact=exact)
    if split != "train" or exact:
        return shapes
    names = ", ".join(dict.fromkeys(axis.name for axis in axes or []))
    if task.couples_samples:
        why: str | None = "the model computes batch statistics, which padding enters"
    else:
        why = dependence(task, program.resolved, program.model_def, program.state, data.example(), shapes)
    if why is None:
        note = f"batches come in many lengths ({names}), which are rounded up to at most {MOST_SIZES} shapes"
        data.notes.append(f"data.shapes: {note}")
        return shapes
    data.pads, shapes.exact = False, True
    data.notes.append(f"data.shapes: padding changes the result ({why}), so every length of {names} keeps its shape")
    return shapes


def dependence(
    task: Task, config: Any, model_def: ModelDef, state: TrainState, batch: Batch, shapes: BatchShapes
) -> str | None:
    """Describe how padding a batch further changes its loss or gradients; return None if it does not.

    batch: a few rows, in numpy. Computed in evaluation mode, without dropout, and at full matmul precision.
    """
    arrays = flatten(batch)
    lengths = shapes.lengths(arrays)
    further = shapes.within(arrays, lengths, tuple(ladder(length + 1) for length in lengths))
    if further == lengths:
        return None  # the model takes no longer input

    def value(params: Any, rows: Batch) -> Any:
        model = model_def.merge(params, state.frozen, state.buffers)
        return task.loss(model, rows, config, None).value.astype(jnp.float32)

    with jax.default_matmul_precision("highest"):
        compute = jax.jit(jax.value_and_grad(value))
        plain, padded = (
            jax.tree.map(to_host, compute(state.params, jax.tree.map(np.asarray, rows)))
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


def shape_of(batch: Any) -> str:
    """Describe the number of samples of a placed batch, and the lengths of its sequences."""
    parts = batch if isinstance(batch, tuple) else (batch,)
    rows = sum(int(np.prod(row_keys.valid(part).shape)) for part in parts)
    leading = row_keys.valid(parts[0]).ndim
    lengths = {leaf.shape[leading] for leaf in jax.tree.leaves(parts[0]) if 0 < leaf.ndim - leading < 3}
    return f"{rows} samples" + (f" of length {' and '.join(map(str, sorted(lengths)))}" if lengths else "")
