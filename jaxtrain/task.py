"""The contract between how to train (`train/`) and what to train (`systems/`).

A task is a value. `systems/<name>/__init__.py` holds `TASKS = {"pretrain": Task(...)}`; so does any importable package
that `task: package.module` names. A batch is a dict of arrays whose first axis is the sample; besides the task's own
keys it always has

    valid   bool [batch]    False marks padding of an uneven batch: it must not touch loss, metrics or statistics
    index   int32 [batch]   the sample's position in the dataset: seed per-sample randomness with it

If a dataset has entries of these names itself, `jaxtrain.data.row_keys` finds the loader's.
"""

import dataclasses
import importlib
import pathlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from jaxtrain import trust
from jaxtrain.errors import UserError
from jaxtrain.optim import groups

Batch = dict[str, Any]
C = TypeVar("C")  # the type of a task's config


class Loss(NamedTuple):
    """Result of a task's loss: the mean, and the weight behind it.

    Attributes:
        value: float scalar, the quantity to minimise, finite also where weight is 0.
        weight: float scalar >= 0, the number of samples, tokens, ... behind the mean. Micro-batches, uneven batches and
            devices are averaged by it, so the result is that of one big batch.
        parts: further float scalars to log, means over the same weight.

    Examples:
        >>> import jax.numpy as jnp, jaxtrain
        >>> errors, valid = jnp.array([1.0, 3.0, 100.0]), jnp.array([True, True, False])
        >>> count = valid.sum()
        >>> jaxtrain.Loss(jnp.where(valid, errors, 0).sum() / jnp.maximum(count, 1), count).value.item()
        2.0
    """

    value: Any
    weight: Any
    parts: Mapping[str, Any] = {}


class MeanLoss(Loss):
    """A Loss whose micro-batches, and devices under ddp_local, count equally whatever their weight.

    This is how torch treats a loss that is a plain value: a step's gradient is the mean of its micro-batches'
    gradients. An evaluation averages the batches' values by their weight, which is the number of rows.
    """


def as_loss(found: Any, batch: Batch) -> Loss:
    """Convert the result of a user's loss function to a Loss.

    found: a scalar, one value per sample (their mean is taken), a Loss, (value, weight), or (value, dict of further
    values to log). Without a weight it becomes a MeanLoss. Raises UserError for anything else, also for an array whose
    first axis is not that of any of the batch's arrays.
    """
    import jax

    from jaxtrain.data import row_keys

    if isinstance(found, Loss):
        return found
    value, weight, parts = found, None, {}
    if isinstance(found, tuple) and len(found) == 2:
        value = found[0]
        weight, parts = (None, found[1]) if isinstance(found[1], Mapping) else (found[1], {})
    if not hasattr(value, "ndim"):
        raise UserError(
            f"the loss returned {type(found).__name__}, wanted a scalar, one value per sample, jaxtrain.Loss, "
            "(value, weight) or (value, dict of values to log)"
        )
    if value.size != 1 and not any(leaf.shape[:1] == value.shape[:1] for leaf in jax.tree.leaves(batch)):
        raise UserError(
            f"the loss returned an array of shape {value.shape}, wanted a scalar, or one value per sample; gradients "
            "are those of scalars alone. Return its .mean() or .sum()"
        )
    mean = lambda array: array.mean() if getattr(array, "ndim", 0) else array
    value, parts = mean(value), {name: mean(part) for name, part in parts.items()}
    return MeanLoss(value, len(row_keys.valid(batch)), parts) if weight is None else Loss(value, weight, parts)


class Statistics(NamedTuple):
    """One evaluation batch's contribution to the metrics.

    Attributes:
        sums: added over batches.
        rows: [batch, ...], concatenated.
    """

    sums: Mapping[str, Any] = {}
    rows: Mapping[str, Any] = {}


class Source(Protocol):
    """A map-style dataset: a torch Dataset, or `jaxtrain.data.sources.ArraySource`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TorchTwin:
    """Functions that take a trained model back to PyTorch. Only they import torch; nothing else of the task does.

    build: config -> the plain torch.nn.Module that loads the exported state dict with strict=True.
    call: (module, batch of torch tensors) -> a tensor or a dict of them, equal to what the task's `outputs` returns.
    loss: (module, batch of torch tensors, config) -> the scalar of the task's loss; for parity tests and benchmarks.
    inputs: (batch of torch tensors, config) -> the batch as the module takes it, after what JAX's step first does to
        images or draws. `loss` and `call` do it themselves if it has not been done; otherwise `loss` is pure torch.
    after_update: (module, updates made, config) -> None, the task's after_update in torch; for benchmarks.
    hf: (config, exported state dict) -> the content of config.json and the state dict under transformers' names, if
        transformers has the model. The state dict's values are passed on unread.
    hf_files: config -> further text files of that folder, by name: the tokenizer's.
    checkpoint: (config, training state as `jaxtrain.export --optimizer` has it, run folder, what the checkpoint knows
        of its run: step, epoch, steps_per_epoch, metrics, best_metrics, train_history, val_history, bad, due, best,
        final) -> None: writes the original's own checkpoint files, for `checkpoint.torch: original`. due, best, final:
        the reasons why it is written.
    folders: further formats of an exported checkpoint, by name. (config, exported state dict, folder, what the
        checkpoint knows of its run: step, steps_per_epoch, metrics, best_metrics) -> the folder that was written.
    stale: config -> names of Python values that have changed since module and loss were recorded with them.
    module: the torch module that the task was recorded from, if it was.
    """

    build: Callable[[Any], Any]
    call: Callable[[Any, Batch], Any]
    loss: Callable[[Any, Batch, Any], Any] | None = None
    inputs: Callable[[Batch, Any], Batch] | None = None
    after_update: Callable[[Any, int, Any], None] | None = None
    hf: Callable[[Any, Mapping[str, Any]], tuple[Mapping[str, Any], Mapping[str, Any]]] | None = None
    hf_files: Callable[[Any], Mapping[str, str]] | None = None
    stale: Callable[[Any], Sequence[str]] = lambda config: ()
    module: Any = None
    checkpoint: Callable[[Any, Mapping[str, Any], pathlib.Path, Mapping[str, Any]], None] | None = None
    folders: Mapping[str, Callable[[Any, Mapping[str, Any], pathlib.Path, Mapping[str, Any]], pathlib.Path]] = (
        dataclasses.field(default_factory=dict)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LegacyConfig:
    """Config of the torch project that a task replaces, so that `jaxtrain.run --config` accepts its YAML.

    name: of the project. keys: dotted keys that its files may hold, by which a file is recognised. convert: the mapping
    in such a file -> nested settings of this project with `task`; keys that it does not read are reported. replaced:
    patterns of keys that need no counterpart here -> the reason, in one sentence. best: the best values of one of its
    searches, a flat mapping -> this project's dotted settings; raises UserError for a name without a counterpart.
    unlisted: keys that its code reads but its files do not hold, so they don't help to recognise a file.
    """

    name: str
    keys: frozenset[str]
    convert: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    replaced: Mapping[str, str] = dataclasses.field(default_factory=dict)
    best: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    unlisted: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metrics(Generic[C]):
    """Metrics of a split, besides its loss.

    outputs: (model, batch) -> array or dict of arrays [batch, ...] in evaluation mode, as the twin's `call` returns.
    eval_statistics: (outputs, batch, config) -> Statistics, in jax.numpy; also scores the torch twin's outputs.
    compute: (sums, rows, config) -> metrics by name, from the whole split's numpy statistics. The split's loss and
        parts are reported without it.
    statistics, finish: former names of eval_statistics and compute, still accepted.
    extra_metrics: (config, step) -> further float scalars of an update to log, such as a momentum; step: 0-based
        update, traced.
    """

    outputs: Callable[[Any, Batch], Any] | None = None
    eval_statistics: Callable[[Any, Batch, C], Statistics] | None = None
    compute: Callable[[Mapping, Mapping, C], dict[str, float]] | None = None
    extra_metrics: Callable[[C, Any], Mapping[str, Any]] | None = None
    statistics: dataclasses.InitVar[Callable[[Any, Batch, C], Statistics] | None] = None
    finish: dataclasses.InitVar[Callable[[Mapping, Mapping, C], dict[str, float]] | None] = None

    def __post_init__(self, statistics: Any, finish: Any):
        for name, given in (("eval_statistics", statistics), ("compute", finish)):
            if given is not None:
                object.__setattr__(self, name, given)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Visuals(Generic[C]):
    """Functions that draw pictures and write reports.

    pictures: (model, batch, config) -> pictures by name, float in 0..1 [height, width, 1 or 3], in jax.numpy; drawn
        from the first validation batch after every evaluation, if there is a tracker.
    histograms: (model, batch, config) -> values by name, float arrays in jax.numpy of which only finite values count;
        from the same batch, at the same time.
    report: (model, source, config, folder) -> files written there; `jaxtrain.evaluate` calls it with a whole split.
    describe: config -> lines for `jaxtrain.run --dry-run`: sizes, operations.
    """

    pictures: Callable[[Any, Batch, C], Mapping[str, Any]] | None = None
    histograms: Callable[[Any, Batch, C], Mapping[str, Any]] | None = None
    report: Callable[[Any, Source, C, Any], Sequence[Any]] | None = None
    describe: Callable[[C], str] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interop(Generic[C]):
    """Links between the task and the torch project that it came from.

    twin: functions that take a trained model back to PyTorch.
    original: the torch project's config, if its files are accepted too; the same object for all tasks of a system.
    initial_weights: config -> torch state dict of (a part of) the model that a fresh run starts from, or None. May read
        files; called once, on the host.
    flags: flag of the torch project's command line, without dashes -> the setting, or a sentence that says why there is
        none.
    """

    twin: TorchTwin | None = None
    original: LegacyConfig | None = None
    initial_weights: Callable[[C], Mapping[str, Any] | None] | None = None
    flags: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(Metrics[C], Visuals[C], Interop[C], Generic[C]):
    """Frozen record of functions, with everything that differs between systems. C is the type of its config.

    Core (Metrics, Visuals and Interop are optional):
    sections: config sections of the task, by name; under a core name (data, optim, ...), a subclass of the core's.
    build_model: (config, flax rngs) -> nnx.Module with torch's attribute names. Traced under jit: no I/O.
        Here, in `loss` and in `after_update`, config.train.steps holds the run's number of optimizer steps.
    build_data: (config, split in "train" | "validation" | "test") -> Source, or None if there is no such split.
    example: config -> a few made-up samples with the shapes of the training data, so that `jaxtrain.plan` needs no
        files; without it, or if it returns None, the plan takes the first sample of build_data.
    collate: list of items -> dict of numpy arrays [batch, ...]; None: torch's default rules.
    loss: (model, batch, config, rngs) -> Loss; `rngs=None` is evaluation mode.
    trainable: (parameter key, config) -> bool; False keeps the parameter fixed, without optimizer state.
    param_group: (parameter key, config) -> name of its group in `optim.groups`.
    after_update: (model, step, config) -> None, changes the model after the optimizer, inside the jitted step; step
        counts the updates made. It may return {parameter key: bool array of its shape}: where True, the optimizer's
        moments are zeroed (resampled features start afresh).
    schedule: (config, schedule, steps_per_epoch) -> a schedule (0-based optimizer step -> factor on optim.lr), for the
        procedures of `compat: original`.
    shard_rules: config -> {pattern of a parameter's key: mesh axis ("tensor" or None) per array axis}, called if
        `shard.tensor` is more than 1 (jaxtrain.runtime.tensor_rules).
    splits_tokens: config -> None, called if `shard.sequence` is more than 1; raises UserError for settings under which
        a sample's tokens cannot be split over devices. None: the model does not split them
        (jaxtrain.runtime.spread.split_tokens).
    traced_hparams: settings that the step may take as arrays, so that runs that differ in them share one compiled
        program: "seed", dropout rates that reach jaxtrain.nn.dropout as they are, coefficients that `loss` reads from
        its config at every call and only computes with.
    graph_numbers: config -> further numbers that the loss takes as arrays, float32 scalars by a key that begins with
        "#": those of a recorded torch graph (jaxtrain.runtime.traced_hparams.number reads them).
    pads_batches: an uneven batch is padded to data.batch_size with rows that are not `valid`, which the loss excludes
        by their weight. False: it comes in its true shape, as in torch.
    target: the batch's entry that outputs are compared with, for the user's own metrics; None if there is none.
    fits: (batch, config) -> False if the model is known not to take batches of these shapes; values don't matter.
    check_batch: (host batch, config) -> None; raises DataError for a batch that the model cannot be trained on.
    couples_samples: a sample's loss depends on the others of its micro-batch (BatchNorm, contrastive terms), so that
        accumulation over micro-batches is not the big batch.
    takes_lora: `lora` of the config puts adapters into the model.
    """

    build_model: Callable[[C, Any], Any]
    loss: Callable[[Any, Batch, C, Any], Loss]
    build_data: Callable[[C, str], Source | None] = lambda config, split: None
    example: Callable[[C], Source | None] | None = None
    sections: Mapping[str, type] = dataclasses.field(default_factory=dict)
    collate: Callable[[Sequence[Any]], Batch] | None = None
    trainable: Callable[[str, C], bool] = lambda key, config: True
    param_group: Callable[[str, C], str] = lambda key, config: "default"
    after_update: Callable[[Any, Any, C], Mapping[str, Any] | None] | None = None
    schedule: Callable[[C, Callable[[int], float], int], Callable[[int], float]] | None = None
    shard_rules: Callable[[C], Mapping[str, tuple]] = lambda config: {}
    splits_tokens: Callable[[C], None] | None = None
    traced_hparams: tuple[str, ...] = ()
    graph_numbers: Callable[[C], Mapping[str, Any]] = lambda config: {}
    pads_batches: bool = True
    target: str | None = None
    fits: Callable[[Batch, C], bool] = lambda batch, config: True
    check_batch: Callable[[Batch, C], None] = lambda batch, config: None
    couples_samples: bool = False
    takes_lora: bool = False


def group_of(task: Task, key: str, config: Any) -> str:
    """Return the group of a parameter: by the patterns of `optim.groups`, else the task's."""
    return groups.name_of(config.optim, key, task.param_group(key, config))


def trains(task: Task, key: str, config: Any) -> bool:
    """Return True if a parameter is trained at all, according to the task and to its group."""
    return task.trainable(key, config) and not groups.is_fixed(config.optim, group_of(task, key, config))


def task_names() -> list[str]:
    """List every task of every system in `jaxtrain.systems`, as "system.task"."""
    names = []
    for module in pkgutil.iter_modules(importlib.import_module("jaxtrain.systems").__path__):
        tasks = _tasks_of(f"jaxtrain.systems.{module.name}") or {}
        names += [f"{module.name}.{task}" for task in tasks]
    return names


def find_task(name: str) -> Task:
    """Return a task by name: "digits.classify", "digits" if a system has one task, or a user's "my_package.my_task".

    Raises UserError, naming the known tasks, if there is no such task.
    """
    head, _, tail = name.rpartition(".")
    own = ((f"jaxtrain.systems.{name}", ""), (f"jaxtrain.systems.{head}", tail))
    outside = ((name, ""),) if trust.allows_task(name) else ()
    for module_name, task_name in own + outside:
        tasks = _tasks_of(module_name)
        if tasks and task_name in tasks:
            return tasks[task_name]
        if tasks and not task_name and len(tasks) == 1:
            return next(iter(tasks.values()))
    if "." not in name:  # `evidence` is criteria_evidence.evidence, if no other system has that task
        meant = [known for known in task_names() if known.endswith(f".{name}")]
        if len(meant) == 1:
            return find_task(meant[0])
    if not outside and "." in name:
        raise trust.refusal("task", name, "config.yaml")
    value = _attribute(head, tail)
    if isinstance(value, Task):
        return value
    found = _tasks_of(head)
    if found and tail in found:
        return found[tail]
    raise UserError(
        f"task: {name!r} is unknown; known here: {', '.join(task_names())}. Your own task is the name of an "
        "importable module that holds TASKS = {...}, or of a Task in it (docs/adding_a_system.md)"
    )


def needs_trust(config: Any) -> bool:
    """Return True if commands on a run folder with this config need --trust, because it names the user's own code."""
    with trust.restricted():
        try:
            find_task(config.task)
            trust.check(config, "config.yaml")
        except UserError:
            return True
    return False


def _import(module_name: str):
    if not all(part.isidentifier() for part in module_name.split(".")):
        return None
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            return None  # no such module; an import that fails inside it is shown to the user
        raise


def _tasks_of(module_name: str) -> Mapping[str, Task] | None:
    return getattr(_import(module_name), "TASKS", None)


def _attribute(module_name: str, attribute: str):
    return getattr(_import(module_name), attribute, None)
