"""Does the export do in torch what the model does in JAX? `python -m torch_bridge.verify --run runs/digits`.

Runs the task's plain torch twin with the exported weights beside the JAX model on real batches, and compares the
outputs of every layer, the loss and the gradients. Exit code 0 where all agree, 1 where something departs.
"""

import argparse
import contextlib
import dataclasses
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
import torch
from flax import nnx

from jaxtrain import commands
from jaxtrain.data import row_keys
from jaxtrain.data.loader import Loader, make_stream, own_batch_size
from jaxtrain.data.sources import as_source, describe_size
from jaxtrain.errors import UserError
from jaxtrain.train import run_dir
from jaxtrain.train.state import ModelDef
from jaxtrain.train.step import evaluation
from torch_bridge import files, layouts
from torch_bridge.datasets import to_numpy, to_torch
from torch_bridge.state_dict import state_dict

Records = list[tuple[str, list[np.ndarray]]]
OUTPUTS, GRADIENTS = 1e-4, 1e-3  # relative L2 that rounding may reach in float32, over many layers


@dataclasses.dataclass(frozen=True)
class Difference:
    """One comparison. size: relative L2 distance; limit: what is accepted."""

    kind: str  # "output", "loss" or "gradient"
    name: str
    size: float
    limit: float

    @property
    def departs(self) -> bool:
        return not self.size <= self.limit  # NaN departs

    def __str__(self) -> str:
        return f"{self.kind:9s}{self.size:10.1e}  {self.name}" + ("   <-- departs" if self.departs else "")


@dataclasses.dataclass(frozen=True)
class Report:
    """Differences: layers in the order in which they finish, the loss, gradients from the last layer to the first."""

    differences: list[Difference]
    unmatched: list[str]  # layers that only one side has, or whose outputs have other shapes

    @property
    def first(self) -> Difference | None:
        return next((difference for difference in self.differences if difference.departs), None)

    def __str__(self) -> str:
        lines = [str(difference) for difference in self.differences]
        if self.unmatched:
            more = ", ..." if len(self.unmatched) > 6 else ""
            lines.append(
                f"not compared, because the two sides are built otherwise: {', '.join(self.unmatched[:6])}{more}"
            )
        counts = {kind: sum(d.kind == kind for d in self.differences) for kind in ("output", "loss", "gradient")}
        compared = ", ".join(f"{kind} {count}" for kind, count in counts.items() if count)
        if self.first is None:
            return "\n".join([*lines, f"all agree: {compared}"])
        first = self.first
        sizes = f"relative difference {first.size:.1e}, accepted {first.limit:.0e}"
        words = f"the {first.kind} of {first.name} departs first: {sizes}"
        return "\n".join([*lines, words])


def main(argv: commands.Arguments = None) -> int:
    p = commands.parser(
        "torch_bridge.verify",
        "Compare an exported run with its torch twin, layer by layer.",
        "python -m torch_bridge.verify --run runs/digits",
    )
    commands.add_run(p)
    p.add_argument("--checkpoint", help="best, last or a step (default best, or last if none was evaluated)")
    p.add_argument("--weights", metavar="F", help="exported file to check (default: export the checkpoint now)")
    p.add_argument("--split", default="validation", help="validation, test or train (default validation)")
    p.add_argument("--batches", type=commands.count(), default=1, help="number of batches (default 1)")
    commands.add_quiet(p)
    commands.add_json(p)
    return commands.main(run, p.parse_args(argv))


def run(arguments: argparse.Namespace) -> int:
    commands.quiet_jax()
    folder = pathlib.Path(arguments.run)
    which = arguments.checkpoint or _best_or_last(folder)
    task, config, model, step = run_dir.load_model(folder, which)
    if task.twin is None or task.outputs is None:
        raise UserError(f"{folder}: {config.task} has no torch twin to compare with")
    dataset = task.build_data(config, arguments.split)
    if dataset is None:
        raise UserError(f"--split {arguments.split}: {config.task} has no such split")
    source = as_source(dataset)
    with tempfile.TemporaryDirectory() as scratch:
        weights = arguments.weights or files.save(state_dict(model), pathlib.Path(scratch) / "model.pt")
        opened = files.open_weights(pathlib.Path(weights))
        twin = _load_twin(task, config, {key: to_torch(leaf) for key, leaf in opened.items()})
    loader = _loader(task, config, source)
    batches = [batch for _, _, batch in loader.batches((i, 1) for i in range(max(1, arguments.batches)))]
    loader.close()
    report = compare(task, config, model, twin, batches)
    if not arguments.json:
        print(f"{config.task}, step {step}, {len(batches)} batches of {arguments.split}; relative L2 differences")
        print(report)
    arguments.found = {"run": str(folder), "checkpoint": step, "split": arguments.split, "batches": len(batches)}
    arguments.found |= {"agrees": report.first is None, "not compared": report.unmatched}
    arguments.found["differences"] = [dataclasses.asdict(d) | {"departs": d.departs} for d in report.differences]
    return 0 if report.first is None else commands.FAILED


def compare(task: Any, config: Any, model: nnx.Module, twin: torch.nn.Module, batches: Sequence[Mapping]) -> Report:
    """Every layer's outputs on all batches; loss and gradients on the first. twin: in evaluation mode."""
    found: dict[str, Difference] = {}
    unmatched: dict[str, None] = {}
    for batch in batches:
        with recording_flax(model) as ours:
            outputs = task.outputs(model, batch)
        ours.append(("the outputs", _arrays(outputs)))
        with recording_torch(twin) as theirs, torch.no_grad():
            outputs = task.twin.call(twin, jax.tree.map(to_torch, batch))
        theirs.append(("the outputs", _arrays(to_numpy(outputs))))
        for name, size in _distances(ours, theirs, np.asarray(row_keys.valid(batch)), unmatched):
            worst = max(size, found[name].size if name in found else 0.0)
            found[name] = Difference("output", name, worst if size == size else size, OUTPUTS)
    differences = list(found.values())
    if task.twin.loss is not None:
        differences += _loss_and_gradients(task, config, model, twin, batches[0])
    return Report(differences, [name for name in unmatched if name not in found])


@contextlib.contextmanager
def recording_flax(model: nnx.Module) -> Iterator[Records]:
    """Collect the outputs of every layer that is called meanwhile, in the order in which they finish.

    Layers that run inside a JAX transformation (scan, remat) have no outputs to show.
    """
    names: dict[int, str] = {}
    _name_modules(model, (), names)
    classes = {type(module) for module in _modules(model) if callable(module)}
    originals = {kind: (kind.__call__, "__call__" in vars(kind)) for kind in classes}
    records: Records = []
    active: set[int] = set()

    def recorded(original):
        def call(self, *args, **kwargs):
            if id(self) not in names or id(self) in active:
                return original(self, *args, **kwargs)
            active.add(id(self))
            try:
                outputs = original(self, *args, **kwargs)
            finally:
                active.discard(id(self))
            if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(outputs)):
                records.append((names[id(self)], _arrays(outputs)))
            return outputs

        return call

    for kind, (original, _) in originals.items():
        kind.__call__ = recorded(original)
    try:
        yield records
    finally:
        for kind, (original, own) in originals.items():
            if own:
                kind.__call__ = original
            else:
                del kind.__call__


@contextlib.contextmanager
def recording_torch(module: torch.nn.Module) -> Iterator[Records]:
    """Collect the outputs of every layer that is called meanwhile, in the order in which they finish."""
    records: Records = []

    def hook(name):
        return lambda layer, inputs, outputs: records.append((name, _arrays(to_numpy(outputs))))

    handles = [layer.register_forward_hook(hook(name)) for name, layer in module.named_modules() if name]
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


def _name_modules(module: nnx.Pytree, path: tuple, names: dict[int, str]) -> None:
    for name, value in layouts.children(module):
        if isinstance(value, nnx.Pytree):
            names.setdefault(id(value), layouts.key_of((*path, name)))
            _name_modules(value, (*path, name), names)


def _modules(module: nnx.Pytree) -> Iterator[nnx.Pytree]:
    for _, value in layouts.children(module):
        if isinstance(value, nnx.Pytree):
            yield value
            yield from _modules(value)


def _arrays(outputs: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(outputs) if hasattr(leaf, "shape")]


def _distances(ours: Records, theirs: Records, valid: np.ndarray, unmatched: dict) -> Iterator[tuple[str, float]]:
    """(layer, distance) for the layers of both sides: the n-th call of a name here with the n-th there."""
    calls: dict[str, list[list[np.ndarray]]] = {}
    for name, arrays in theirs:
        calls.setdefault(name, []).append(arrays)
    counts: dict[str, int] = {}
    for name, arrays in ours:
        counts[name] = counts.get(name, 0) + 1
        label = name if counts[name] == 1 else f"{name}, call {counts[name]}"
        other = calls[name].pop(0) if calls.get(name) else None
        if other is None or [a.shape for a in arrays] != [b.shape for b in other]:
            unmatched[name] = None
        elif arrays:
            yield label, max(_distance(_rows(a, valid), _rows(b, valid)) for a, b in zip(arrays, other, strict=True))
    unmatched |= {name: None for name, left in calls.items() if left}


def _rows(array: np.ndarray, valid: np.ndarray) -> np.ndarray:
    return array[valid] if array.shape[:1] == valid.shape else array


def _distance(ours: np.ndarray, theirs: np.ndarray, scale: float = 0.0) -> float:
    """Relative to the larger of the norm and `scale`. NaN on both sides in the same place is agreement."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    both = np.isnan(ours) & np.isnan(theirs) | (ours == theirs)
    size = np.linalg.norm(np.where(both, 0, ours - theirs))
    return float(size / max(np.linalg.norm(np.where(np.isfinite(theirs), theirs, 0)), scale, 1e-12))


def _loss_and_gradients(task: Any, config: Any, model: nnx.Module, twin: torch.nn.Module, batch: Mapping):
    model_def = ModelDef.of(model, lambda key: task.trainable(key, config))
    params, frozen, buffers = model_def.split(model)
    batch = {key: np.asarray(value) if not isinstance(value, (dict, tuple)) else value for key, value in batch.items()}

    def loss(params):
        return task.loss(model_def.merge(params, frozen, buffers), batch, config, None).value

    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    twin.zero_grad()
    theirs = task.twin.loss(twin, jax.tree.map(to_torch, dict(batch)), config)
    yield Difference("loss", "the first batch", _distance(np.asarray(value), to_numpy(theirs)), OUTPUTS)
    theirs.backward()
    first = layouts.first_names(model)
    ours = {first[key]: np.asarray(gradient) for key, gradient in gradients.items()}
    given = {name: None if p.grad is None else to_numpy(p.grad) for name, p in twin.named_parameters()}
    given = {name: np.zeros_like(ours[name]) if grad is None else grad for name, grad in given.items() if name in ours}
    largest = max((float(np.linalg.norm(grad)) for grad in given.values()), default=0.0)
    scale = 1e-3 * largest  # smaller differences are rounding
    for name in reversed(given):
        yield Difference("gradient", name, _distance(ours[name], given[name], scale), GRADIENTS)


# --- whole splits -----------------------------------------------------------------------------------------------------


def compare_with_twin(folder: pathlib.Path, weights: pathlib.Path, dataset: Any) -> str:
    """One line: the metrics on both sides over the whole dataset, and the largest difference of the outputs.

    weights: a .pt file, read by torch itself and loaded into the task's torch twin with strict=True.
    """
    task, config, model, step = run_dir.load_model(folder, _best_or_last(folder))
    twin = _load_twin(task, config, torch.load(weights, map_location="cpu", weights_only=True, mmap=True))
    source = as_source(dataset)
    loader = _loader(task, config, source)
    outputs = jax.jit(cast(Callable, task.outputs))
    sides: dict[str, list] = {"jax": [], "torch": []}
    largest = 0.0
    calls = ((step_, 1) for step_ in range(loader.stream.steps_per_epoch or sys.maxsize))
    for _, _, batch in loader.batches(calls):
        ours = jax.device_get(outputs(model, batch))
        with torch.no_grad():
            theirs = to_numpy(task.twin.call(twin, jax.tree.map(to_torch, batch)))
        valid = row_keys.valid(batch)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            largest = max(largest, float(np.abs(a[valid] - b[valid]).max()))
        for side, value in (("jax", ours), ("torch", theirs)):
            if task.eval_statistics is not None:
                given = task.eval_statistics(value, batch, config)
                sums = {f"sum/{key}": value for key, value in given.sums.items()}
                rows = {**given.rows, evaluation.VALID: valid} if given.rows else {}
                sides[side].append(evaluation.Statistics(sums, rows))
    loader.close()
    words = []
    for side, collected in sides.items():
        metrics = evaluation.compute(task, config, *evaluation.collect(collected)) if collected else {}
        words += [f"{side} " + " ".join(f"{name} {value:.6f}" for name, value in metrics.items())] if metrics else []
    found = [", ".join(words)] if words else []
    found.append(f"largest output difference {largest:.1e}")
    return f"step {step} on {describe_size(source)} validation samples: {'; '.join(found)}"


def _best_or_last(folder: pathlib.Path) -> str:
    return "best" if run_dir.open_run(folder)[2].best() is not None else "last"


def _load_twin(task: Any, config: Any, state: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    twin = task.twin.build(config).eval()
    twin.load_state_dict(state, strict=True)
    return twin


def _loader(task: Any, config: Any, source: Any) -> Loader:
    """The whole split once, in order, on this process."""
    size = own_batch_size(source) or config.data.eval_batch_size or config.data.batch_size
    stream = make_stream(source, size, config.seed, False, False, False)
    return Loader(source, stream, lambda batches: batches[0], np.arange(size), task.collate, seed=config.seed)


if __name__ == "__main__":
    commands.start(main)
