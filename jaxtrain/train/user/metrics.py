"""The user's own metrics: functions of a batch or of a whole split, and torchmetrics objects.

They run on the host, after the compiled evaluation step, on its outputs and the rows of its batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.data import row_keys
from jaxtrain.data.collate import picked
from jaxtrain.errors import UserError
from jaxtrain.metrics import WholeSplit
from jaxtrain.runtime import traced_hparams
from jaxtrain.train.step import evaluation
from torch_bridge.call_forms import arguments_of, names_target, needed_arguments
from torch_bridge.lazy_array import to_host

FILLING = -100  # pads rows of different lengths before they are joined, as in transformers
TORCH, JAX = "torch", "jax.numpy"
COUNTING = ("update", "compute", "reset")  # torchmetrics' protocol


class Entries(dict):
    """Named arrays that a metric can read as `outputs["logits"]`, `outputs.logits` or `outputs[0]`."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int):
            return super().__getitem__(str(key)) if str(key) in self else list(self.values())[key]
        return super().__getitem__(key)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no entry {name!r}; there are {', '.join(self)}") from None


class EvalPrediction:
    """A whole split as transformers' compute_metrics takes it: `logits, labels = prediction`.

    predictions, label_ids: numpy arrays, or tuples of several; rows of different lengths are padded with -100.
    """

    def __init__(self, predictions: Any, label_ids: Any):
        self.predictions, self.label_ids = predictions, label_ids

    def __iter__(self) -> Iterator[Any]:
        return iter((self.predictions, self.label_ids))

    def __getitem__(self, index: int) -> Any:
        return (self.predictions, self.label_ids)[index]


class UserMetrics:
    """The metrics that were given to a Trainer.

    metrics: by name, one of: a function (outputs, batch), or (outputs, target) or (target, outputs) if its arguments
    have such names, -> one value per row, or a scalar, weighted by the number of rows; a WholeSplit; a torchmetrics
    object, updated with (outputs, target); a pair of such an object and a function (outputs, batch) -> its arguments.
    compute_metrics: transformers' (EvalPrediction) -> values by name. kind: arrays that functions are first tried with,
    torch or jax.numpy. target: the batch's entry that outputs are compared with, or None. Raises UserError for any
    other kind of metric.
    """

    def __init__(
        self, metrics: Mapping[str, Any] | None, compute_metrics: Callable | None, kind: str, target: str | None
    ):
        if not isinstance(metrics, Mapping | None):
            raise UserError(
                f"metrics: {type(metrics).__name__}, wanted a dict of them by name, as {{'accuracy': lambda outputs, "
                "target: outputs.argmax(1) == target}"
            )
        self.metrics, self.compute_metrics, self.target = dict(metrics or {}), compute_metrics, target
        self.kinds = dict.fromkeys(self.metrics, kind)
        for name, metric in self.metrics.items():
            self._check(name, metric)
        self._keeps = compute_metrics is not None or any(isinstance(m, WholeSplit) for m in self.metrics.values())
        self.begin()

    def _check(self, name: str, metric: Any) -> None:
        if name == "loss":
            raise UserError("metrics: `loss` is the loss's own name; take another")
        pair = isinstance(metric, tuple) and len(metric) == 2 and _counts(metric[0]) and callable(metric[1])
        known = pair or callable(metric) or isinstance(metric, WholeSplit) or _counts(metric)
        if isinstance(metric, type) or not known:
            raise UserError(
                f"metrics: {name} is {getattr(metric, '__name__', type(metric).__name__)}, wanted a function (outputs, "
                "batch), a torchmetrics object, a pair of one and a function that gives its arguments, or WholeSplit"
            )
        if _counts(metric) and self.target is None:
            raise UserError(
                f"metrics: {name}: which entry of the batch is {type(metric).__name__} to compare with? Give a pair: "
                "(the object, lambda outputs, batch: (outputs, batch[...]))"
            )

    # --- before the run -----------------------------------------------------------------------------------------

    def settle(self, outputs: Any, batch: Mapping[str, Any]) -> None:
        """Find out if each function takes torch or JAX arrays, by calling it on zeros. Raises UserError for a result of
        wrong shape."""
        rows = len(row_keys.valid(batch))
        own = row_keys.without(batch)
        for name, metric in self.metrics.items():
            if isinstance(metric, (WholeSplit, tuple)) or _counts(metric):
                continue
            first = self.kinds[name]
            for kind in (first, JAX if first == TORCH else TORCH):
                try:
                    found = self._apply(name, metric, *(_given(part, kind) for part in (outputs, own)))
                except Exception:  # it may reject zeros, or arrays of this kind
                    continue
                self.kinds[name] = kind
                _values(name, found, rows)
                break

    def names(self) -> list[str] | None:
        """Return the metrics' names; None if they are only known after the first evaluation."""
        if self.compute_metrics is not None:
            return None
        several = [metric for metric in self.metrics.values() if hasattr(_object(metric), "items")]
        return None if several else list(self.metrics)

    # --- an evaluation ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start a pass over a split."""
        self._sums = {name: [0.0, 0] for name in self.metrics}
        self._kept: list[tuple[Any, Any]] = []
        for metric in self.metrics.values():
            if _object(metric) is not None:
                _object(metric).reset()

    def update(self, outputs: Any, batch: Mapping[str, Any]) -> None:
        """Update the metrics with a batch and its outputs. Raises UserError, which names the metric, if one raises."""
        valid = np.asarray(to_host(row_keys.valid(batch)))
        own = row_keys.without(batch)
        host = lambda: jax.tree.map(to_host, (outputs, own))
        if not valid.all() or jax.process_count() > 1:
            outputs, own = picked(host()[0], valid.nonzero()[0]), picked(host()[1], valid.nonzero()[0])
        rows = int(valid.sum())
        if not rows:
            return
        given = {kind: tuple(_given(part, kind) for part in (outputs, own)) for kind in set(self.kinds.values())}
        for name, metric in self.metrics.items():
            if isinstance(metric, WholeSplit):
                continue
            found = _called(name, self._apply, name, metric, *given[self.kinds[name]])
            if _object(metric) is None:
                total, count = _values(name, found, rows)
                self._sums[name][0] += total
                self._sums[name][1] += count
        if self._keeps:
            self._kept.append(jax.tree.map(np.asarray, host()))

    def _apply(self, name: str, metric: Any, outputs: Any, batch: Any) -> Any:
        if isinstance(metric, tuple):
            arguments = metric[1](outputs, batch)
            metric[0].update(*(arguments if isinstance(arguments, tuple) else (arguments,)))
        elif _counts(metric):
            metric.update(_main(outputs), batch[self.target])
        else:
            known = names_target(metric) or len(needed_arguments(metric)) > 2
            arguments = arguments_of(metric, list(batch), self.target, compares=False) if known else None
            return metric(outputs, batch) if arguments is None else arguments.call(metric, outputs, batch)
        return None

    def compute(self) -> dict[str, float]:
        """Return the metrics of the whole split."""
        found: dict[str, float] = {}
        whole = _joined(self._kept) if self._keeps and self._kept else None
        for name, metric in self.metrics.items():
            if isinstance(metric, WholeSplit):
                found |= {} if whole is None else _numbers(name, _called(name, metric.function, *map(_entries, whole)))
            elif _object(metric) is not None:
                found |= _numbers(name, _called(name, _object(metric).compute))
            else:
                total, count = self._sums[name]
                found[name] = total / max(count, 1)
        if self.compute_metrics is not None and whole is not None:
            outputs, batch = whole
            several = isinstance(outputs, Mapping) and len(outputs) > 1
            predictions = tuple(outputs.values()) if several else _main(outputs)
            prediction = EvalPrediction(predictions, self._labels(batch))
            values = _called("compute_metrics", self.compute_metrics, prediction)
            if not isinstance(values, Mapping):
                raise UserError(f"compute_metrics returned {type(values).__name__}, wanted a dict of numbers")
            for name, value in values.items():
                found |= _numbers(str(name), value)
        self._kept = []
        return found

    def _labels(self, batch: Mapping[str, Any]) -> Any:
        if self.target is not None:
            return batch[self.target]
        spans = tuple(batch[name] for name in ("start_positions", "end_positions") if name in batch)
        return spans or None


def settle(program: Any) -> None:
    """Try a Program's metrics on zeros. Raises UserError for what can be known to fail before the run starts."""
    task, config, metrics = program.task, program.config, program.metrics
    optim, watched = config.optim.schedule, config.evaluation.metric
    plain = watched == "loss" and (optim.name != "plateau" or optim.metric == "loss")
    if metrics is None and (task.pads_batches or plain):
        return
    batch, state, keep = program.data.example(), program.state, metrics is not None
    step = evaluation.make_eval_step(task, config, program.model_def, program.precision, program.layout, keep)
    numbers = traced_hparams.given(config, task.traced_hparams)
    found: Any = jax.eval_shape(step, state.params, state.frozen, state.buffers, batch, {}, numbers)
    if metrics is not None:
        found, (outputs, _) = found
        if outputs is None:
            raise UserError("metrics: this task names no outputs; give a Task with outputs=(model, batch) -> arrays")
        metrics.settle(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), outputs), batch)
    own = [] if metrics is None else metrics.names()
    if own is None or task.pads_batches or not program.has_validation:
        return  # some names are known only after the first evaluation
    zeros = {name: np.zeros(value.shape) for name, value in found.sums.items()}
    known = [*evaluation.compute(task, config, zeros, {}), *own]
    evaluation.check_metric(watched, known, "evaluation.metric")
    if optim.name == "plateau":
        evaluation.check_metric(optim.metric, known, "optim.schedule.metric")


def _counts(metric: Any) -> bool:
    return not isinstance(metric, type) and all(callable(getattr(metric, name, None)) for name in COUNTING)


def _object(metric: Any) -> Any:
    """Return the torchmetrics object of a metric, or None."""
    found = metric[0] if isinstance(metric, tuple) else metric
    return found if _counts(found) else None


def _entries(value: Any) -> Any:
    return Entries(value) if isinstance(value, Mapping) else value


def _given(value: Any, kind: str) -> Any:
    """Convert arrays to torch tensors or JAX arrays, by kind."""
    if kind == TORCH:
        from torch_bridge.module_tensors import to_tensors

        return _entries(to_tensors(jax.tree.map(to_host, value)))
    return _entries(jax.tree.map(jnp.asarray, value))


def _main(outputs: Any) -> Any:
    """Return the output that a target is compared with: the only one, `logits`, or the first."""
    if not isinstance(outputs, Mapping):
        return outputs
    return outputs["logits"] if "logits" in outputs else next(iter(outputs.values()))


def _called(name: str, function: Callable, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except UserError:
        raise
    except Exception as error:  # user code may raise anything
        words = " ".join(str(error).split())[:300]
        raise UserError(f"metrics: {name} raised {type(error).__name__}: {words}") from error


def _values(name: str, found: Any, rows: int) -> tuple[float, int]:
    """Return sum and count of a function's result for a batch. Raises UserError for a result of wrong type or shape."""
    if found is None:
        raise UserError(
            f"metrics: {name} returned None, wanted a scalar or one value per row of the batch: return the value. One "
            "that counts for itself is an object with update, compute and reset, as torchmetrics has them"
        )
    host = found.detach() if hasattr(found, "detach") else found
    try:
        array = np.asarray(to_host(host), np.float64)
    except (TypeError, ValueError):
        raise UserError(f"metrics: {name} returned {type(found).__name__}, wanted numbers") from None
    if array.ndim == 0:
        return float(array) * rows, rows
    if array.shape == (rows,):
        return float(array.sum()), rows
    raise UserError(
        f"metrics: {name} returned shape {list(array.shape)} for a batch of {rows} rows, wanted a scalar or one value "
        "per row"
    )


def _numbers(name: str, value: Any) -> dict[str, float]:
    """Return {name: number}, or for a mapping {"name/entry": number, ...}. Raises UserError for anything else."""
    if isinstance(value, Mapping):
        return {f"{name}/{key}": number for key, inner in value.items() for number in _numbers("", inner).values()}
    if value is None:
        raise UserError(f"metrics: {name} returned None for a whole split, wanted a number, or a dict of them")
    array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    if array.size != 1:
        raise UserError(f"metrics: {name} returned shape {list(array.shape)} for a whole split, wanted one number")
    return {name: float(array.reshape(()))}


def _joined(parts: Sequence[Any]) -> Any:
    """Concatenate batches; rows of different lengths are padded with -100."""

    def join(*arrays: np.ndarray) -> np.ndarray:
        longest = np.max([array.shape[1:] for array in arrays], axis=0).astype(int) if arrays[0].ndim > 1 else ()
        fill = lambda a: [(0, 0), *((0, n - have) for n, have in zip(longest, a.shape[1:], strict=True))]
        return np.concatenate([np.pad(array, fill(array), constant_values=FILLING) for array in arrays])

    return jax.tree.map(join, *parts)
