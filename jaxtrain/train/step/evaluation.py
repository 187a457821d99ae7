"""Compute metrics of a whole split: sums and rows over its batches; losses are averaged by weight."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.data import row_keys
from jaxtrain.data.row_keys import gather
from jaxtrain.errors import UserError
from jaxtrain.runtime import traced_hparams
from jaxtrain.runtime.mesh import Layout
from jaxtrain.runtime.precision import Precision
from jaxtrain.task import Batch, Statistics, Task
from jaxtrain.train.step.state import Arrays, ModelDef

VALID = row_keys.PREFIX + row_keys.VALID  # prefixed, so as not to collide with a task's own rows


def make_eval_step(
    task: Task, config: Any, model_def: ModelDef, precision: Precision, layout: Layout, keep: bool = False
) -> Callable:
    """Return (params, frozen, buffers, batch, columns, numbers) -> Statistics, with the loss and its parts in the sums.

    keep: return (Statistics, (outputs, batch)) instead, for the user's own metrics.
    """

    def eval_step(
        params: Arrays, frozen: Arrays, buffers: Arrays, batch: Batch, columns: Arrays, numbers: Arrays
    ) -> Any:
        with layout.spread(), traced_hparams.in_force(numbers):
            return evaluated(params, frozen, buffers, batch, columns, numbers)

    def evaluated(params, frozen, buffers, batch, columns, numbers) -> Any:
        settings = traced_hparams.put(config, numbers)
        model = model_def.merge(precision.for_compute(params), precision.for_compute(frozen), buffers)
        batch = gather(batch, columns)
        value, weight, parts = task.loss(model, batch, settings, None)
        weight = jnp.asarray(weight, jnp.float32)
        sums: dict[str, Any] = {f"loss/{key}": part * weight for key, part in {"loss": value, **parts}.items()}
        sums["weight/loss"] = weight
        rows: dict[str, Any] = {}
        wanted = keep or task.eval_statistics is not None
        outputs = task.outputs(model, batch) if wanted and task.outputs is not None else None
        if task.eval_statistics is not None:
            given = task.eval_statistics(outputs, batch, settings)
            sums |= {f"sum/{key}": value for key, value in given.sums.items()}
            rows = {**given.rows, VALID: row_keys.valid(batch)} if given.rows else {}
        found = Statistics(sums, rows)
        return (found, (outputs, batch)) if keep else found

    return eval_step


def check_metric(name: str, known: Iterable[str], setting: str) -> None:
    """Raise UserError, which suggests the nearest name, if a metric is unknown. setting: the setting that names it."""
    known = list(known)
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"{setting}: {name} is unknown; this task has {', '.join(known)}{hint}")


def collect(eval_statistics: Iterable[Statistics]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the sums over all batches in float64, and the valid rows of all batches, concatenated."""
    sums: dict[str, Any] = {}
    rows: dict[str, list] = {}
    for batch in eval_statistics:
        given_sums, given_rows = jax.device_get((dict(batch.sums), dict(batch.rows)))
        for key, value in given_sums.items():
            sums[key] = sums.get(key, 0) + np.asarray(value, np.float64)
        if given_rows:
            valid = np.asarray(given_rows.pop(VALID))
            for key, value in given_rows.items():
                rows.setdefault(key, []).append(np.asarray(value)[valid])
    return sums, {key: np.concatenate(values) for key, values in rows.items()}


def compute(
    task: Task, config: Any, sums: Mapping[str, np.ndarray], rows: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """Return the split's metrics: loss and its parts, then those that the task computes from its statistics."""
    metrics: dict[str, float] = {}
    if "weight/loss" in sums:
        weight = max(float(sums["weight/loss"]), float(np.finfo(np.float32).tiny))
        metrics = {k.removeprefix("loss/"): float(v) / weight for k, v in sums.items() if k.startswith("loss/")}
    if task.compute is not None:
        own = {key.removeprefix("sum/"): value for key, value in sums.items() if key.startswith("sum/")}
        metrics |= {key: float(value) for key, value in task.compute(own, rows, config).items()}
    return metrics
