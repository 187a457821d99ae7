"""Comparison of a run's model with its torch twin, layer by layer and over a whole split."""

import argparse
import dataclasses
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
import torch
from flax import nnx

from jaxtrain import Trainer, TrainingConfig, commands
from jaxtrain.data import row_keys
from jaxtrain.data.loader import Loader, make_stream, own_batch_size
from jaxtrain.data.sources import as_source, describe_size
from jaxtrain.errors import UserError
from jaxtrain.systems.torch_module.torch_definition import dataset_of, find
from jaxtrain.train import run_dir
from jaxtrain.train.step import evaluation
from jaxtrain.train.step.state import ModelDef
from torch_bridge import files, layouts
from torch_bridge.comparison import (
    GRADIENTS,
    OUTPUTS,
    Difference,
    Report,
    arrays_of,
    distance,
    distances,
    recording_flax,
    recording_torch,
)
from torch_bridge.datasets import to_numpy, to_torch
from torch_bridge.lowering.errors import exception_line
from torch_bridge.state_dict import state_dict


def run(arguments: argparse.Namespace) -> int:
    commands.quiet_jax()
    if arguments.run is None and arguments.module is None:
        raise UserError("verify: give --run DIR, or --module PKG:FUNCTION with --data PKG:FUNCTION")
    if arguments.module is not None:
        return _verify_module(arguments)
    if arguments.run is not None and run_dir.made_in_python(arguments.run):
        raise UserError(
            f"{arguments.run}: its module was made in Python; name the functions that make it and its data, and it is "
            "compared with itself under torch, with this run's weights: --module PKG:FUNCTION --data PKG:FUNCTION "
            "[--loss PKG:NAME]. In the script, trainer.load_best() and trainer.verify() do the same"
        )
    return _verify_run(arguments)


def _verify_module(arguments: argparse.Namespace) -> int:
    if arguments.data is None:
        raise UserError("verify: --module needs --data PKG:FUNCTION, which gives the training Dataset")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    torch.manual_seed(0)
    source = "the weights it is made with"
    module = _call(arguments.module, "--module")
    if not isinstance(module, torch.nn.Module):
        raise UserError(f"--module: {arguments.module} gives {type(module).__name__}, wanted a torch.nn.Module")
    if arguments.run is not None:
        which = arguments.checkpoint or _best_or_last(pathlib.Path(arguments.run))
        weights = state_dict(run_dir.load_model(arguments.run, which)[2])
        _load_strictly(module, {key: to_torch(leaf) for key, leaf in weights.items()}, arguments.run)
        source = f"the weights of {arguments.run} ({which})"
    loss = None if arguments.loss is None else find(arguments.loss, "--loss")
    loss = loss() if isinstance(loss, type) else loss
    stepped: Any = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-3)
    if arguments.optimizer is not None:
        stepped = _call(arguments.optimizer, "--optimizer", module)
    optimizer, scheduler = stepped if isinstance(stepped, tuple) else (stepped, None)
    config = TrainingConfig(batch_size=arguments.batch_size, max_steps=arguments.steps)
    data = dataset_of(arguments.data, "train", {}, "--data")
    trainer = Trainer(module, data, None, config, loss=loss, optimizer=optimizer, scheduler=scheduler)
    certificate = trainer.verify(arguments.steps)
    arguments.found = certificate.as_dict()
    if not arguments.json:
        print(f"{arguments.module} in JAX beside itself in torch, both with {source}")
        print(certificate)
    if arguments.output is not None:
        certificate.write(arguments.output)
        if not arguments.json:
            print(f"wrote {arguments.output}/certificate.html and certificate.json")
    return 0 if certificate.agrees else commands.FAILED


def _call(path: str, key: str, *given: Any) -> Any:
    """Call the function at `package:name`. Raises UserError if it does not exist or raises."""
    made = find(path, key)
    try:
        return made(*given)
    except UserError:
        raise
    except Exception as error:  # the user's code may raise anything
        words = " ".join(str(error).split())[:300]
        raise UserError(f"{key}: {path} raised {type(error).__name__}: {words}, at {exception_line(error)}") from error


def _load_strictly(module: torch.nn.Module, weights: Mapping[str, torch.Tensor], run: str) -> None:
    try:
        module.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        raise UserError(
            f"--module: the weights of {run} are not this module's: {' '.join(str(error).split())}"
        ) from None


def _verify_run(arguments: argparse.Namespace) -> int:
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
        own_module = config.task is not None and config.task.startswith("torch_module")
        twin_is = "the same module in torch" if own_module else "its torch twin"
        print(f"{config.task} in JAX, step {step}, beside {twin_is} with {arguments.weights or 'that step exported'}")
        print(f"{len(batches)} batches of {arguments.split}; relative L2 differences")
        print(report)
    arguments.found = {"run": str(folder), "checkpoint": step, "split": arguments.split, "batches": len(batches)}
    arguments.found |= {"agrees": report.first is None, "not compared": report.unmatched}
    arguments.found["differences"] = [dataclasses.asdict(d) | {"departs": d.departs} for d in report.differences]
    return 0 if report.first is None else commands.FAILED


def compare(task: Any, config: Any, model: nnx.Module, twin: torch.nn.Module, batches: Sequence[Mapping]) -> Report:
    """Compare every layer's outputs on all batches; loss and gradients on the first. twin: in evaluation mode."""
    found: dict[str, Difference] = {}
    unmatched: dict[str, None] = {}
    for batch in batches:
        with recording_flax(model) as ours:
            outputs = task.outputs(model, batch)
        ours.append(("the outputs", arrays_of(outputs)))
        with recording_torch(twin) as theirs, torch.no_grad():
            outputs = task.twin.call(twin, jax.tree.map(to_torch, batch))
        theirs.append(("the outputs", arrays_of(to_numpy(outputs))))
        for name, size in distances(ours, theirs, np.asarray(row_keys.valid(batch)), unmatched):
            worst = max(size, found[name].size if name in found else 0.0)
            found[name] = Difference("output", name, worst if size == size else size, OUTPUTS)
    differences = list(found.values())
    if task.twin.loss is not None:
        differences += _loss_and_gradients(task, config, model, twin, batches[0])
    return Report(differences, [name for name in unmatched if name not in found])


def _loss_and_gradients(task: Any, config: Any, model: nnx.Module, twin: torch.nn.Module, batch: Mapping):
    model_def = ModelDef.of(model, lambda key: task.trainable(key, config))
    params, frozen, buffers = model_def.split(model)
    batch = {key: np.asarray(value) if not isinstance(value, (dict, tuple)) else value for key, value in batch.items()}

    def loss(params):
        return task.loss(model_def.merge(params, frozen, buffers), batch, config, None).value

    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    twin.zero_grad()
    theirs = task.twin.loss(twin, jax.tree.map(to_torch, dict(batch)), config)
    yield Difference("loss", "the first batch", distance(np.asarray(value), to_numpy(theirs)), OUTPUTS)
    theirs.backward()
    first = layouts.first_names(model)
    ours = {first[key]: np.asarray(gradient) for key, gradient in gradients.items()}
    given = {name: None if p.grad is None else to_numpy(p.grad) for name, p in twin.named_parameters()}
    given = {name: np.zeros_like(ours[name]) if grad is None else grad for name, grad in given.items() if name in ours}
    largest = max((float(np.linalg.norm(grad)) for grad in given.values()), default=0.0)
    scale = 1e-3 * largest  # smaller differences are rounding
    for name in reversed(given):
        yield Difference("gradient", name, distance(ours[name], given[name], scale), GRADIENTS)


# --- whole splits -----------------------------------------------------------------------------------------------------


def compare_with_twin(folder: pathlib.Path, weights: pathlib.Path, dataset: Any) -> str:
    """Return one line: the metrics on both sides over the whole dataset, and the largest difference of the outputs.

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
    return "best" if run_dir.open_checkpoints(folder).best() is not None else "last"


def _load_twin(task: Any, config: Any, state: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    twin = task.twin.build(config).eval()
    twin.load_state_dict(state, strict=True)
    return twin


def _loader(task: Any, config: Any, source: Any) -> Loader:
    """Load the whole split once, in order, on this process."""
    wanted = config.data.eval_batch_size or config.data.batch_size
    size = own_batch_size(source, least=wanted) or wanted
    stream = make_stream(source, size, config.seed, False, False, False)
    return Loader(source, stream, lambda batches: batches[0], np.arange(size), task.collate, seed=config.seed)
