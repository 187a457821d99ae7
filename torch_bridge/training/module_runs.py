"""Torch modules of many runs, grouped by the program that they can share."""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch.utils import _pytree as pytree

from jaxtrain.errors import UserError, one_line
from torch_bridge.datasets import to_numpy, to_torch
from torch_bridge.from_torch import state_of
from torch_bridge.lowering.errors import exception_line
from torch_bridge.records import Record
from torch_bridge.training.graph_numbers import NotLifted, Numbers, Observation, lift, observed
from torch_bridge.training.loss_entry import LossEntry
from torch_bridge.training.torch_task import TorchTask

MOST_CAPTURED = 4  # runs of a group whose graphs are recorded, to tell its numbers from each other


@dataclasses.dataclass
class ModuleRun:
    """A run's module as `make` gives it for a seed, its loss and initial weights.

    numbers: the settings of module and loss that are floats, by name. seed: of the initial weights.
    """

    seed: int
    numbers: dict[str, float]
    module: torch.nn.Module
    loss: Any
    weights: dict[str, np.ndarray]
    observation: tuple[Observation, ...] = ()


@dataclasses.dataclass
class Group:
    """Runs that share a program. runs: their positions. task: the first run's, whose graphs take the numbers of all.
    numbers: by position. why: why runs of the same structure are not in this group; "" if all are."""

    runs: list[int]
    task: TorchTask
    numbers: dict[int, dict[str, np.float32]]
    why: str = ""


class SharedRecord(Record):
    """The record of one module with graphs that stand for the modules of several runs."""

    def __init__(self, record: Record, graphs: Mapping[bool, Sequence[Any]]):
        vars(self).update(vars(record))
        self._graphs = {
            mode: [(graph, spec) for graph, (_, spec) in zip(graphs[mode], known, strict=True)]
            for mode, known in record._graphs.items()
        }

    @staticmethod
    def parts(record: Record) -> dict[bool, list[Any]]:
        """Return a record's graphs by mode."""
        return {mode: [graph for graph, _ in known] for mode, known in record._graphs.items()}

    def _record(self, leaves, spec, training: bool) -> Any:
        shapes = ", ".join(str(list(getattr(leaf, "shape", ()))) for leaf in leaves)
        raise UserError(
            f"{type(self.entry.wrapped_module).__name__}: a batch of shapes {shapes} needs its own graph, and runs "
            "in one program have the graphs of their first batch: set data.drop_last=true, or give batches of one size"
        )


def make_run(
    make_module: Callable, loss: Any, seed: int, module_settings: Mapping[str, Any], loss_settings: Mapping[str, Any]
) -> ModuleRun:
    """Return a run's module and loss, made with torch's generator at `seed`, which is put back afterwards.

    loss: a loss as Trainer takes it or, with settings, a class or function that gives one. Raises UserError if one of
    the two fails.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = _called(make_module, "make_module", module_settings)
        if loss_settings or isinstance(loss, type):
            loss = _called(loss, "loss", loss_settings)
    if not isinstance(module, torch.nn.Module):
        raise UserError(f"make_module gave {type(module).__name__}, wanted a torch.nn.Module")
    named = {**module_settings, **{f"loss.{name}": value for name, value in loss_settings.items()}}
    floats = {name: float(value) for name, value in named.items() if isinstance(value, float)}
    weights = {name: np.array(value) for name, value in state_of(module).items()}
    return ModuleRun(seed, floats, module, loss, weights)


def _called(make: Callable, name: str, settings: Mapping[str, Any]) -> Any:
    shown = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    try:
        inspect.signature(make).bind(**settings)
    except TypeError as error:
        raise UserError(f"{name}({shown}): {error}; the space names its arguments") from None
    except ValueError:  # C code tells no signature
        pass
    try:
        return make(**settings)
    except UserError:
        raise
    except Exception as error:  # the user's code can raise anything
        where = exception_line(error)
        raise UserError(f"{name}({shown}) raised {type(error).__name__}: {one_line(error)}, at {where}") from error


def observe(run: ModuleRun, task: TorchTask) -> None:
    """Note what torch computes for this run on a batch of zeros, in training and in evaluation mode."""
    batch = {
        key: jax.tree.map(lambda s: to_torch(np.zeros(s.shape, s.dtype)), task.shapes[key]) for key in task.entries
    }
    batch = pytree.tree_map(lambda leaf: leaf.long() if leaf.dtype == torch.int32 else leaf, batch)
    try:
        run.observation = tuple(_observed(run, task, batch, training) for training in (True, False))
    except UserError:
        raise
    except Exception as error:  # whatever torch or the module raises
        raise UserError(
            f"{type(run.module).__name__} with {run.numbers} raised {type(error).__name__}: {one_line(error)}, at "
            f"{exception_line(error)}"
        ) from error


def _observed(run: ModuleRun, task: TorchTask, batch: Any, training: bool) -> Observation:
    module, loss = copy.deepcopy((run.module, run.loss))
    trained = loss.parameters() if isinstance(loss, torch.nn.Module) else ()
    state = {name: p for name, p in module.state_dict(keep_vars=True).items() if isinstance(p, torch.Tensor)}
    state |= {f"loss {i}": p for i, p in enumerate(trained)}
    return observed(LossEntry(module, loss, task.plan), state, (batch,), training)


def grouped(
    runs: Sequence[ModuleRun],
    task_of: Callable[[ModuleRun], TorchTask],
    leads: Callable[[Any], bool] = lambda run: True,
) -> list[Group]:
    """Return the runs as groups that share a program each. task_of: makes (records) a run's task."""
    first = task_of(runs[0])
    for run in runs:
        observe(run, first)
    alike: dict[tuple, list[int]] = {}
    for position, run in enumerate(runs):
        alike.setdefault(tuple(seen.structure for seen in run.observation) + _shapes(run), []).append(position)
    groups: list[Group] = []
    for positions in alike.values():
        groups += _of_structure(runs, positions, task_of, first if positions[0] == 0 else None)
    return groups


def _shapes(run: ModuleRun) -> tuple:
    trained = {name for name, parameter in run.module.named_parameters() if parameter.requires_grad}
    return tuple((name, value.shape, value.dtype.str, name in trained) for name, value in run.weights.items())


def _of_structure(runs, positions: list[int], task_of: Callable, first: TorchTask | None) -> list[Group]:
    """Return the groups of runs that torch computes by the same operators: one, unless a number cannot be an input."""
    floats = [np.array([runs[p].observation[mode].floats for p in positions], np.float64) for mode in (0, 1)]
    task = first or task_of(runs[positions[0]])
    if all(len(np.unique(each, axis=0)) <= 1 for each in floats):
        return [Group(positions, task, {})]
    names = runs[positions[0]].numbers
    settings = [np.array([runs[p].numbers[name] for p in positions]) for name in names]
    try:
        numbers = Numbers(settings, [column for each in floats for column in each.T], _telling(floats))
        tasks = [task, *(task_of(runs[positions[i]]) for i in numbers.captured[1:])]
        _share(tasks, numbers)
        for each in floats:
            numbers.explain(each)
        return [Group(positions, task, {p: numbers.of_run(i) for i, p in enumerate(positions)})]
    except NotLifted as reason:
        return list(_by_value(runs, positions, floats, task_of, str(reason)))


def _by_value(runs, positions, floats, task_of, why: str) -> Iterable[Group]:
    same: dict[tuple, list[int]] = {}
    for i, position in enumerate(positions):
        same.setdefault(tuple(float(value) for each in floats for value in each[i]), []).append(position)
    for own in same.values():
        yield Group(own, task_of(runs[own[0]]), {}, why)


def _telling(floats: Sequence[np.ndarray]) -> list[int]:
    """Return positions of runs, the first among them, in which different numbers differ. Raises NotLifted if that would
    take many."""
    columns = np.concatenate([each.T for each in floats])
    columns = np.unique(columns, axis=0)
    chosen = [0]
    while len(np.unique(columns[:, chosen], axis=0)) < len(columns) or any(
        len(set(column[chosen])) == 1 < len(set(column)) for column in columns
    ):
        score = lambda i: (
            sum(len(set(column[[*chosen, i]])) > 1 for column in columns),
            len(np.unique(columns[:, [*chosen, i]], axis=0)),
        )
        if len(chosen) == MOST_CAPTURED:
            raise NotLifted("so many of its numbers vary one by one that recordings cannot tell them from each other")
        chosen.append(max(set(range(columns.shape[1])) - set(chosen), key=score))
    return chosen


def _share(tasks: Sequence[TorchTask], numbers: Numbers) -> None:
    """Let the first task's records stand for all."""
    for name in ("loss_record", "forward_record"):
        records = [getattr(task, name) for task in tasks]
        parts = [SharedRecord.parts(record) for record in records]
        lifted = {
            mode: [lift(graphs, numbers) for graphs in zip(*(p[mode] for p in parts), strict=True)] for mode in parts[0]
        }
        setattr(tasks[0], name, SharedRecord(records[0], lifted))


def weights_of(run: ModuleRun) -> dict[str, np.ndarray]:
    """Return the initial weights, and those of a loss that is trained."""
    if not isinstance(run.loss, torch.nn.Module):
        return run.weights
    return run.weights | {f"loss.{name}": to_numpy(p) for name, p in run.loss.named_parameters()}
