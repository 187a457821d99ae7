"""Make the Task that trains a torch module. torch is imported only if there is such a module."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from jaxtrain.data import row_keys
from jaxtrain.data.widths import float32_may_lose, narrow
from jaxtrain.errors import DataError, UserError
from jaxtrain.task import Batch, Loss, MeanLoss, Statistics, Task, TorchTwin

if TYPE_CHECKING:
    from torch_bridge.training.torch_task import TorchTask


def is_torch_module(model: Any) -> bool:
    """Return True for a torch.nn.Module, without importing torch."""
    return any(
        (base.__module__, base.__name__) == ("torch.nn.modules.module", "Module") for base in type(model).__mro__
    )


def task_of_torch_module(
    module: Any,
    loss: Callable | None,
    example_batch: Batch,
    single_row: bool = False,
    adapters: Any = None,
    items: Sequence[Any] = (),
    collate: Callable | None = None,
) -> Task:
    """Return a Task that trains this module; arguments as in TorchTask. example_batch: may hold the dataset's float64.
    single_row: batches of one sample will come, which torch may refuse (BatchNorm). adapters: a LoraConfig and the seed
    of its weights, to add to the module. items, collate: samples as the dataset returns them, and the user's function
    of them, to find tensors whose class counts.

    `task.twin.build(None)` returns a copy of the module; `torch_bridge.from_torch.write_back(model, module)` writes
    trained weights into the module itself. Raises UserError for a module that cannot be converted, and for one that
    computes something from float64 entries that float32 cannot represent.
    """
    from torch_bridge.training import tensor_classes
    from torch_bridge.training.torch_task import TorchTask

    exact = row_keys.without(example_batch)
    mapped = lambda function, batch: {key: jax.tree.map(function, value) for key, value in batch.items()}
    example = mapped(narrow, exact)  # keeps the dataset's order, which decides what a loss without names takes
    try:
        made = TorchTask(module, loss, example, adapters=adapters)
    except UserError as error:
        if not (methods := tensor_classes.methods_lost(items)):
            raise
        raise UserError(f"{error}\n{methods}") from error
    if other := tensor_classes.other_with_class(made, items, collate):
        raise UserError(other)
    lost = made.lost_digits(exact) if float32_may_lose(exact) else ""
    if lost:
        raise UserError(f"{lost}: return from the Dataset, in float32, what the module makes of them")
    if inside := made.lost_inside(example):
        raise UserError(f"{inside}: your own loop with jaxtrain.compile leaves such a loss to torch")
    if single_row:
        try:
            made.record(mapped(lambda value: value[:1], example), training=True)
        except UserError as error:
            raise UserError(
                "training batches of one sample will come (an epoch's last one goes with data.drop_last=true), and on "
                f"those {error}"
            ) from error
    options: dict[str, Any] = {"couples_samples": made.couples_samples, "target": made.plan.target}
    return task_of(lambda config: made, made.call, made.module, **options)


def task_of(
    converted: Callable[[Any], "TorchTask"], call: Callable[[Any, Batch], Any], module: Any = None, **options: Any
) -> Task:
    """Return the Task of a torch module that is known only once there is a config.

    converted: config -> TorchTask, the same object at every call. call, module: as in TorchTwin. options: further
    fields of the Task.
    """
    return Task(
        build_model=lambda config, rngs: converted(config).build(),
        initial_weights=lambda config: converted(config).weights(),
        loss=lambda model, batch, config, rngs: _loss(converted(config).loss(model, batch, rngs), batch),
        outputs=lambda model, batch: model.definition.outputs(model, batch),
        eval_statistics=lambda outputs, batch, config: Statistics(
            converted(config).eval_sums(outputs, batch, row_keys.valid(batch))
        ),
        compute=lambda sums, rows, config: converted(config).metrics(sums),
        trainable=lambda key, config: converted(config).trainable(key),
        twin=TorchTwin(
            build=lambda config: converted(config).copy(),
            call=call,
            loss=lambda module, batch, config: converted(config).torch_loss(module, batch),
            stale=lambda config: converted(config).stale(),
            folders={
                "peft": lambda config, state, folder, meta: _lora().save(converted(config).module, folder, state),
                "merged": lambda config, state, folder, meta: _lora().merged_folder(
                    converted(config).module, state, folder
                ),
            },
            module=module,
        ),
        pads_batches=False,
        takes_lora=True,
        fits=lambda batch, config: converted(config).fits(batch),
        check_batch=lambda batch, config: _check(converted(config), batch, config.train.accumulate_steps),
        **options,
    )


def _check(made: "TorchTask", batch: Batch, pieces: int) -> None:
    from torch_bridge.lowering.index_checks import IndexOutOfBounds

    try:
        made.check(batch, pieces)
    except IndexOutOfBounds as error:
        rows = row_keys.index(batch)
        named = "" if error.row is None or error.row >= len(rows) else f" (sample {int(rows[error.row])})"
        raise DataError(f"{error}{named}") from error


def _lora() -> Any:
    from torch_bridge.training import lora

    return lora


def _loss(found: Mapping[str, Any], batch: Batch) -> Loss:
    weight, parts, rows = found.get("weight"), found["parts"], len(row_keys.valid(batch))
    return MeanLoss(found["value"], rows, parts) if weight is None else Loss(found["value"], weight, parts)
