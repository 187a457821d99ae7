"""The contract between how to train (`train/`) and what to train (`systems/`).

A task is a value. `systems/<name>/__init__.py` holds `TASKS = {"pretrain": Task(...)}`; so does any importable package
that `task: package.module` names. A batch is a dict of arrays whose first axis is the sample; besides the task's own
keys it always has

    valid   bool [batch]    False marks padding of an uneven batch: it must not touch loss, metrics or statistics
    index   int32 [batch]   the sample's position in the dataset: seed per-sample randomness with it

A dataset may have entries of these names itself; `jaxtrain.data.row_keys` finds the loader's then.
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
    """Hold the result of a task's loss: the mean, and the weight behind it.

    value: float scalar, the quantity to minimise, finite also where weight is 0.
    weight: float scalar >= 0, the number of samples, tokens, ... behind the mean. Accumulation, uneven batches and
    devices average `value` by it, so the result is that of one big batch.
    parts: further float scalars to log, means over the same weight.
    """

    value: Any
    weight: Any
    parts: Mapping[str, Any] = {}


class MeanLoss(Loss):
    """A Loss whose micro-batches, and devices under ddp_local, count alike whatever their weight.

    So torch counts a loss that is a plain value: the gradient of a step is the mean of its micro-batches' gradients.
    An evaluation averages the batches' values by their weight, which is the number of rows.
    """


def as_loss(found: Any, rows: int) -> Loss:
    """Return the result of a loss function of a user's own as a Loss.

    found: a scalar, one value per sample (its mean counts), a Loss, or a pair: of a value and its weight, or of a value
    and a dict of further values to log. rows: samples of the batch. Without a weight it is a MeanLoss.
    """
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
    value = value.mean() if value.ndim else value
    return MeanLoss(value, rows, parts) if weight is None else Loss(value, weight, parts)


class Statistics(NamedTuple):
    """Hold one evaluation batch's contribution: `sums` are added over batches, `rows` ([batch, ...]) concatenated."""

    sums: Mapping[str, Any] = {}
    rows: Mapping[str, Any] = {}


class Source(Protocol):
    """A map-style dataset: what torch calls a Dataset, or `jaxtrain.data.sources.ArraySource`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TorchTwin:
    """How a trained model returns to PyTorch. The functions import torch; nothing else of the task does.

    build: config -> the plain torch.nn.Module that loads the exported state dict with strict=True.
    call: (module, batch of torch tensors) -> what the task's `outputs` gives in JAX, a tensor or a dict of them.
    loss: (module, batch of torch tensors, config) -> the scalar that the task's loss gives; for parity and benchmarks.
    inputs: (batch of torch tensors, config) -> the batch as the module takes it: what JAX's step does to images or
        draws first. `loss` and `call` do it too where it is not done; done before, `loss` is pure torch.
    after_update: (module, updates made, config) -> None, the task's after_update in torch; for benchmarks.
    hf: (config, exported state dict) -> the content of config.json and the state dict under transformers' names, where
        transformers has the model. The state dict's values are passed on unread.
    hf_files: config -> further text files of that folder, by name: the tokenizer's.
    checkpoint: (config, training state as `jaxtrain.export --optimizer` has it, run folder, what the checkpoint knows
        of its run: step, epoch, steps_per_epoch, metrics, best_metrics, train_history, val_history, bad, due, best,
        final) -> None: writes the original's own checkpoint files, for `checkpoint.torch: original`. due, best, final:
        why it is written.
    folders: further forms of an exported checkpoint, by name. (config, exported state dict, folder, what the checkpoint
        knows of its run: step, steps_per_epoch, metrics, best_metrics) -> the folder, written.
    stale: config -> names of the Python values that module and loss were recorded with and that have changed since.
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
    """The config of the torch project that a task replaces, so that `jaxtrain.run --config` takes its YAML.

    name: of the project. keys: what its files may hold, dotted; a file is recognised by them. convert: such a file's
    mapping -> nested settings of this project with `task`; keys that it does not read are reported. replaced: patterns
    of keys that need no counterpart here -> the reason, in one sentence. best: the best values of one of its searches,
    a flat mapping -> this project's dotted settings; raises UserError for a name without a counterpart. unlisted: keys
    that its code reads and its files do not hold, by which no file is recognised.
    """

    name: str
    keys: frozenset[str]
    convert: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    replaced: Mapping[str, str] = dataclasses.field(default_factory=dict)
    best: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    unlisted: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metrics(Generic[C]):
    """How a split is scored, beside its loss.

    outputs: (model, batch) -> array or dict of arrays [batch, ...] in evaluation mode; the twin's `call` does too.
    eval_statistics: (outputs, batch, config) -> Statistics, in jax.numpy; scores the torch twin's outputs too.
    compute: (sums, rows, config) -> metrics by name, from the whole split's numpy statistics. The split's loss and
        parts are there without it.
    statistics, finish: what eval_statistics and compute were called; tasks that say so are taken.
    extra_metrics: (config, step) -> further float scalars of an update to log, as a momentum; step: 0-based update,
        traced.
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
    """Draw pictures and reports for people.

    pictures: (model, batch, config) -> pictures by name, float in 0..1 [height, width, 1 or 3], in jax.numpy; drawn
        from the first validation batch after every evaluation, where there is a tracker.
    histograms: (model, batch, config) -> values by name, float arrays of which those that are finite count, in
        jax.numpy; of the same batch, at the same time.
    report: (model, source, config, folder) -> files written there; `jaxtrain.evaluate` calls it with a whole split.
    describe: config -> lines for `jaxtrain.run --dry-run`: sizes, operations.
    """

    pictures: Callable[[Any, Batch, C], Mapping[str, Any]] | None = None
    histograms: Callable[[Any, Batch, C], Mapping[str, Any]] | None = None
    report: Callable[[Any, Source, C, Any], Sequence[Any]] | None = None
    describe: Callable[[C], str] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interop(Generic[C]):
    """The torch project that the task came from, and the way back to it.

    twin: how a trained model returns to PyTorch.
    original: the torch project's config, where its files are accepted too; one value for all tasks of a system.
    initial_weights: config -> torch state dict of (a part of) the model that a fresh run starts from, or None. May read
        files; called once, on the host.
    flags: names of the torch project's command line, without dashes -> the setting, or the reason why there is none, a
        sentence.
    """

    twin: TorchTwin | None = None
    original: LegacyConfig | None = None
    initial_weights: Callable[[C], Mapping[str, Any] | None] | None = None
    flags: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(Metrics[C], Visuals[C], Interop[C], Generic[C]):
    """A frozen record of functions; everything that differs between two systems. C is the type of its config.

    Core (Metrics, Visuals and Interop are optional):
    sections: config sections of the task, by name; a name the core has (data, optim, ...) must subclass it.
    build_model: (config, flax rngs) -> nnx.Module with torch's attribute names. Traced under jit: no I/O.
        Here, in `loss` and in `after_update`, config.train.steps holds the run's number of optimizer steps.
    build_data: (config, split in "train" | "validation" | "test") -> Source, or None where there is no such split.
    example: config -> a few made-up samples with the shapes of the training data, for `jaxtrain.plan`, which then asks
        for no files; without it, or where it gives None, the plan takes the first sample of build_data.
    collate: list of items -> dict of numpy arrays [batch, ...]; None takes torch's default rules.
    loss: (model, batch, config, rngs) -> Loss; `rngs=None` is evaluation mode.
    trainable: parameter key -> False keeps it fixed, without optimizer state.
    param_group: parameter key -> name of its group in `optim.groups`.
    after_update: (model, step, config) -> None, changes the model after the optimizer, inside the jitted step; step
        counts the updates made. It may return {parameter key: bool array of its shape}: where True, the optimizer
        forgets its moments (resampled features start afresh).
    schedule: (config, schedule, steps_per_epoch) -> schedule: 0-based optimizer step -> factor on optim.lr; for the
        procedures of `compat: original`.
    shard_rules: config -> {pattern of a parameter's key: mesh axis ("tensor" or None) per array axis}, asked for where
        `shard.tensor` is more than 1 (jaxtrain.runtime.tensor_rules).
    splits_tokens: config -> None, where `shard.sequence` is more than 1: raises UserError for settings under which the
        tokens of a sample cannot lie on several devices. None: the model does not split them
        (jaxtrain.runtime.spread.split_tokens).
    traced_hparams: settings that the step may take as arrays, so that runs that differ in them share one compiled
        program: "seed", dropout rates that reach jaxtrain.nn.dropout as they are, coefficients that `loss` reads from
        its config at every call and only computes with.
    pads_batches: an uneven batch is filled up to data.batch_size with rows that are not `valid`, which the loss leaves
        out by its weight. False: it comes in its true shape, as in torch.
    target: the batch's entry that outputs are compared with, for metrics of the user's own; None where it has none.
    fits: (batch, config) -> whether the model takes batches of these shapes as far as it is known; only shapes count.
    check_batch: (host batch, config) -> None; raises DataError for one that the model cannot be trained on.
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
    pads_batches: bool = True
    target: str | None = None
    fits: Callable[[Batch, C], bool] = lambda batch, config: True
    check_batch: Callable[[Batch, C], None] = lambda batch, config: None
    couples_samples: bool = False
    takes_lora: bool = False


def group_of(task: Task, key: str, config: Any) -> str:
    """The group of a parameter: by the patterns of `optim.groups`, else the task's."""
    return groups.name_of(config.optim, key, task.param_group(key, config))


def trains(task: Task, key: str, config: Any) -> bool:
    """Tell whether a parameter is trained at all: the task and its group say so."""
    return task.trainable(key, config) and not groups.is_fixed(config.optim, group_of(task, key, config))


def task_names() -> list[str]:
    """Every task of every system in `jaxtrain.systems`, as "system.task"."""
    names = []
    for module in pkgutil.iter_modules(importlib.import_module("jaxtrain.systems").__path__):
        tasks = _tasks_of(f"jaxtrain.systems.{module.name}") or {}
        names += [f"{module.name}.{task}" for task in tasks]
    return names


def find_task(name: str) -> Task:
    """`"digits.classify"`, `"digits"` where a system has one task, or `"my_package.my_task"` from outside.

    Raises UserError naming the known tasks.
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
    if "." not in name:  # `evidence` for criteria_evidence.evidence, where no other system has one
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
        f"task: {name!r} is unknown; known here: {', '.join(task_names())}. A task of your own is the name of an "
        "importable module that holds TASKS = {...}, or of a Task in it (docs/adding_a_system.md)"
    )


def needs_trust(config: Any) -> bool:
    """Tell whether a command on the run folder of such a config runs only with --trust: for code of the user's own."""
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
            return None  # no such module; anything it fails to import itself is the user's to see
        raise


def _tasks_of(module_name: str) -> Mapping[str, Task] | None:
    return getattr(_import(module_name), "TASKS", None)


def _attribute(module_name: str, attribute: str):
    return getattr(_import(module_name), attribute, None)
