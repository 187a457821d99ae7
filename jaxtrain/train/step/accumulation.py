"""Refuse losses for which averaging over micro-batches gives a wrong gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.task import Batch, MeanLoss, Task
from jaxtrain.train.step.state import ModelDef, TrainState


def refuse_sums(task: Task, config: Any, model_def: ModelDef, state: TrainState, rows: Batch) -> None:
    """Raise UserError for a plain value that is a sum over the batch: twice the rows give twice the loss.

    A step's gradient is the mean over its micro-batches, which would be only a fraction of the whole batch's gradient.
    rows: a few samples, read on the host.
    """

    def values(params, frozen, buffers, batch) -> list[Any]:
        losses = []
        for copies in (1, 2):
            repeated = jax.tree.map(lambda leaf: jnp.concatenate([leaf] * copies), batch)
            losses.append(task.loss(model_def.merge(params, frozen, buffers), repeated, config, None))
        return [loss.value for loss in losses] if isinstance(losses[0], MeanLoss) else []

    batch = jax.tree.map(np.asarray, rows)
    found = [float(value) for value in jax.jit(values)(state.params, state.frozen, state.buffers, batch)]
    if found and found[0] and np.isclose(found[1], 2 * found[0], rtol=1e-4):
        parts = config.train.accumulate_steps
        raise UserError(
            f"train.accumulate_steps: {parts}, but this loss is a sum over the batch (twice the rows, twice the loss), "
            f"and micro-batches are averaged: every step would take 1/{parts} of its gradient. Return the mean over "
            "the rows, or (value, weight) for a mean that counts by its weight"
        )
