"""Find or make the Task of a run: given, named, or made from a loss function or a torch module."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxtrain import config_io
from jaxtrain.config import LoraConfig, TrainingConfig
from jaxtrain.data import row_keys
from jaxtrain.data.batch_shapes import collate_of
from jaxtrain.data.example import first_samples
from jaxtrain.data.loader import Loader, Stream, make_stream, own_batch_size
from jaxtrain.data.peek import read_by
from jaxtrain.data.sample_reader import raw_items
from jaxtrain.data.sources import ForeignSource, SequentialSource
from jaxtrain.data.widths import float64_kept
from jaxtrain.errors import UserError
from jaxtrain.task import Task, as_loss, find_task
from jaxtrain.torch_task import is_torch_module, task_of_torch_module
from jaxtrain.train.step.short_batches import cannot_cut


def check_arguments(model: Any, datasets: Mapping[str, Any], config: Any, loss: Any = None) -> None:
    """Raise UserError if arguments of Trainer are swapped or of a wrong type; the message says what is wanted."""
    order = "the order is Trainer(model, train_dataset, val_dataset, config)"
    for name, given in (("model", model), ("loss", loss)):
        if isinstance(given, type):
            raise UserError(f"{name}: got the class {given.__name__}; pass an object of it, {given.__name__}(...)")
    if not (loss is None or callable(loss)):
        raise UserError(f"loss: got {_named(loss)}, wanted a loss module or a function, torch.nn.CrossEntropyLoss()")
    if isinstance(model, str):
        raise UserError(f"model: got the text {model!r}; a task's name goes to task={model!r}, with model=None")
    if not (model is None or is_torch_module(model) or isinstance(model, nnx.Module)):
        kinds = "a torch.nn.Module, a flax nnx.Module, or None for the task's own"
        raise UserError(f"model: got {_named(model)}, wanted {kinds}; {order}")
    for name, dataset in datasets.items():
        if isinstance(dataset, TrainingConfig) or is_torch_module(dataset) or isinstance(dataset, nnx.Module):
            raise UserError(f"{name}: got {_named(dataset)}, wanted a dataset; {order}, each may be named")
    if not isinstance(config, TrainingConfig):
        advice = "jaxtrain.load_config(FILE)" if isinstance(config, str) else "TrainingConfig(**settings)"
        raise UserError(f"config: got {_named(config)}, wanted a TrainingConfig, as {advice} makes one; {order}")


def _named(value: Any) -> str:
    return f"an object of {type(value).__module__}.{type(value).__qualname__}".replace(" builtins.", " ")


def resolve_task(task: Task | str | None, loss: Callable | None, config: TrainingConfig) -> Task:
    """Return the task: given, named, or made from a loss. Raises UserError if there is none.

    loss: (model, batch, rngs) -> a scalar, one value per sample (their mean is taken), a Loss, (value, weight), or
    (value, dict of further values to log).
    """
    found = _resolved(task, loss, config)
    if config.lora.rank and not found.takes_lora:
        raise UserError(
            f"lora: goes into a torch module, and {config.task or 'this model'} is none; criteria_evidence has "
            "model.lora and memory_lm memory.use_lora for theirs"
        )
    return found


def _resolved(task: Task | str | None, loss: Callable | None, config: TrainingConfig) -> Task:
    if isinstance(task, Task):
        return task
    name = task or config.task
    if loss is not None:
        return Task(
            build_model=_no_model,
            loss=lambda model, batch, config, rngs: as_loss(loss(model, batch, rngs), batch),
            pads_batches=False,
        )
    if name is None:
        raise UserError(
            "no task: set `task` in the config, pass task=..., or pass loss=(model, batch, rngs) -> a scalar"
        )
    return find_task(name)


def _no_model(config: TrainingConfig, rngs: Any) -> Any:
    raise UserError(
        "model: None, and with loss=... a model is wanted, as torch.nn.Linear(3, 1); a task's own needs no loss"
    )


def task_of_module(module: Any, source: Any, config: TrainingConfig, loss: Callable | None, task: Any) -> Task:
    """Return the Task of a torch module, recorded with an example batch of the real size; the size can vary later.

    The example repeats two samples of the first batch; if a user's collate function returns entries with different
    numbers of rows, it is the first batch itself. Raises UserError if the module or its arguments cannot be used.
    """
    if isinstance(task, Task) and task.twin is not None and task.twin.module is module:
        return task  # recorded before
    if task is not None or config.task is not None:
        raise UserError("a torch module is a task of its own: leave `task` out, and name its loss with loss=...")
    from torch_bridge.setting_edits import refuse_modes_around

    refuse_modes_around()
    if source is None:
        raise UserError(
            "a torch module needs its dataset: Trainer(module, train_dataset, val_dataset, config, loss=...)"
        )
    epochs, steps = config.train.epochs or 1, config.train.steps
    workers = config.data.num_workers or getattr(source, "workers_wanted", 0)
    read_by(source, workers, config.data.stream_shards is not None)
    wanted = config.data.batch_size
    size = own_batch_size(source, config.seed, epochs, steps, wanted) or wanted
    stream = make_stream(source, size, config.seed, True, config.data.shuffle, config.data.drop_last, epochs, steps)
    collate = collate_of(None, source, config)
    place = lambda batches: batches[0]
    loader = Loader(source, stream, place, np.arange(size), collate, seed=config.seed, keep_texts=True)
    micro = max(size // config.train.accumulate_steps, 1)
    with float64_kept():
        example = _example(loader, micro)
    adapters = (config.lora, config.seed) if config.lora.rank else None
    items, function = _items(loader), getattr(getattr(source, "collate", None), "function", None)
    try:
        return task_of_torch_module(module, loss, example, _single_row(stream, micro), adapters, items, function)
    except UserError as error:
        texts = list(loader.texts.get(0, {}))
        if not texts:
            raise
        raise UserError(
            f"{error}\nThe dataset returns strings for {', '.join(map(repr, texts))}, which stay on the host, for "
            "metrics and callbacks: a module or a loss needs numbers, as classes.index(name) or a tokenizer gives them"
        ) from error


def _example(loader: Loader, micro: int) -> dict[str, Any]:
    own = getattr(loader.source, "collate", None) is not None
    example = loader.host_batch(0) if own else first_samples(loader)
    samples = len(row_keys.valid(example))
    entries = jax.tree_util.tree_leaves_with_path(row_keys.without(example))
    counts = {leaf.shape[0] if leaf.ndim else 0 for _, leaf in entries}
    if len(counts) > 1:
        if micro < loader.stream.batch_size:
            raise next(cannot_cut(p, leaf.shape, samples) for p, leaf in entries if leaf.shape[:1] != (samples,))
        return example
    rows = lambda value: np.take(value, np.arange(micro) % min(2, len(value)), axis=0)
    return {key: jax.tree.map(rows, value) for key, value in example.items()}  # in the dataset's own order


def _items(loader: Loader) -> list[Any]:
    """Return the first two samples as a map-style dataset returns them; the run reads them only once."""
    if not isinstance(loader.source, ForeignSource) or isinstance(loader.source, SequentialSource):
        return []
    return raw_items(loader.reader, loader.stream.batch(0)[0][:2], converted=False)


def _single_row(stream: Stream, micro: int) -> bool:
    """Return True if micro-batches of a single sample will come, as far as this is known in advance."""
    if stream.steps_per_epoch is None:
        return micro == 1
    return micro == 1 or int(stream.batch(stream.steps_per_epoch - 1)[1].sum()) % micro == 1


def with_defaults(task: Task, config: TrainingConfig) -> TrainingConfig:
    """Return the config in the task's own schema, so that sections such as `config.model` exist."""
    if not task.sections or all(isinstance(getattr(config, name, None), kind) for name, kind in task.sections.items()):
        return config
    return config_io.validate(config_io.schema(task), config.model_dump(exclude_unset=True))


def with_lora(config: TrainingConfig, lora: LoraConfig | Mapping[str, Any] | None) -> TrainingConfig:
    """Return the config with the separately given LoRA settings. Raises UserError for unknown keys."""
    if lora is None:
        return config
    if not isinstance(lora, LoraConfig):
        lora = config_io.validate(TrainingConfig, {"lora": dict(lora)}).lora
    return config.model_copy(update={"lora": lora})
