"""Programs of a sweep: the runs, grouped by the compiled step that they share, on their devices."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from jaxtrain.config import TrainingConfig
from jaxtrain.errors import UserError
from jaxtrain.task import Task, TorchTwin
from jaxtrain.train.compilation.compile_key import code_of
from jaxtrain.train.program import Program


@dataclasses.dataclass
class Plan:
    """A run to be: its settings, and those of module, loss and config among them. train, validation: its sources."""

    values: dict[str, Any]
    train: Any
    validation: Any
    module: dict[str, Any] = dataclasses.field(default_factory=dict)
    loss: dict[str, Any] = dataclasses.field(default_factory=dict)
    number: int = 0
    config: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)


@dataclasses.dataclass
class Batch:
    """Runs that train together: variants of one program, on one device."""

    plans: list[Plan]
    programs: list[Program]
    device: Any


@dataclasses.dataclass
class Prepared:
    """All batches of a sweep. notes: why some runs have a program of their own."""

    batches: list[Batch]
    notes: list[str]


def programs(
    plans: Sequence[Plan],
    make_run: Callable[[Plan], Any],
    task_of: Callable[[Plan, Any], Task],
    devices: Sequence[Any],
    most: int,
) -> Prepared:
    """Return the plans as batches of at most `most` runs, spread over the devices.

    make_run: makes a plan's torch_bridge.training.module_runs.ModuleRun. task_of: (plan, run) -> the Task that its
    module is recorded as. Raises UserError for modules, losses or settings that cannot be used, before anything is
    trained.
    """
    from torch_bridge.training import module_runs

    runs = [make_run(plan) for plan in plans]
    of_run = {id(run): plan for run, plan in zip(runs, plans, strict=True)}
    tasks: dict[int, Task] = {}

    def recorded(run: Any) -> Any:
        task = task_of(of_run[id(run)], run)
        made = cast(TorchTwin, task.twin).build(None).definition
        made.record_outputs()
        tasks[id(made)] = task
        return made

    prepared = Prepared([], [])
    for group in module_runs.grouped(runs, recorded):
        if group.why and group.why not in prepared.notes:
            prepared.notes.append(group.why)
        task = _task(tasks[id(group.task)], runs, plans, group)
        for positions in _alike(group.runs, plans, task):
            share = min(most, -(-len(positions) // len(devices)))
            leads: dict[int, Program] = {}
            for i, first in enumerate(range(0, len(positions), share)):
                chunk, device = [plans[p] for p in positions[first : first + share]], devices[i % len(devices)]
                if id(device) not in leads:
                    data = chunk[0].train, chunk[0].validation
                    leads[id(device)] = Program(task, chunk[0].config, *data, None, [device], abstract=True)
                prepared.batches.append(Batch(chunk, [_variant(leads[id(device)], plan) for plan in chunk], device))
    return prepared


def _task(task: Any, runs: Sequence[Any], plans: Sequence[Plan], group: Any) -> Any:
    """Return a group's task: weights and numbers are those of the run whose folder the config names."""
    from torch_bridge.training import module_runs

    place = {plans[p].config.run.dir: p for p in group.runs}
    numbers: Mapping[int, Any] = group.numbers
    return dataclasses.replace(
        task,
        initial_weights=lambda config: module_runs.weights_of(runs[place[config.run.dir]]),
        graph_numbers=lambda config: numbers.get(place[config.run.dir], {}),
        traced_hparams=("seed",),
    )


def _alike(positions: Sequence[int], plans: Sequence[Plan], task: Any) -> list[list[int]]:
    """Group runs further: by the settings that are code, and by the sizes of their data."""
    alike: dict[tuple, list[int]] = {}
    size = lambda source: len(source) if hasattr(source, "__len__") else -1
    for position in positions:
        plan = plans[position]
        key = code_of(plan.config, task), size(plan.train), None if plan.validation is None else size(plan.validation)
        alike.setdefault(key, []).append(position)
    return list(alike.values())


def _variant(lead: Program, plan: Plan) -> Program:
    try:
        return lead.variant(plan.config, plan.train, plan.validation)
    except ValueError as error:
        raise UserError(f"run {plan.number}: {error}") from error


def as_tensors(weights: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return arrays as torch tensors, as `load_state_dict` takes them."""
    from torch_bridge.datasets import to_torch

    return {name: to_torch(np.array(value)) for name, value in weights.items()}
