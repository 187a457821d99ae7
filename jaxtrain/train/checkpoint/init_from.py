"""`init_from`: load a fresh run's weights, and its optimizer's state if the file holds one."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import config_io, trust
from jaxtrain.config import EvaluationConfig
from jaxtrain.errors import UserError
from jaxtrain.optim import groups
from jaxtrain.train import run_dir
from jaxtrain.train.checkpoint import loading, torch_checkpoint
from jaxtrain.train.program import Program
from torch_bridge import optimizer_state as bridge
from torch_bridge import state_dict
from torch_bridge.files import checkpoint
from torch_bridge.files.averages import averages
from torch_bridge.layouts import first_names, parameter_order
from torch_bridge.state_dict import place


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """Result of loading: lines to log, and the plateau rule's state if the file holds one."""

    lines: list[str]
    plateau: Mapping[str, Any] | None = None


def apply(program: Program, path: str | pathlib.Path, weights_only: bool = False) -> WarmStart:
    """Load a run folder (weights), a weights file, a Hugging Face folder or a training checkpoint into a fresh program.

    From a training checkpoint, with `init_optimizer`, the run continues at its step, with its moments and its position
    in the schedule. program: or a Trainer. weights_only: ignore an optimizer's state. Raises UserError for a file that
    is missing, damaged, unsafe, not finite, or of another model or optimizer.
    """
    program = getattr(program, "program", program)
    path = locate(path)
    if (path / "config.yaml").is_file() and (path / "checkpoints").is_dir():
        weights, step = _of_run(program, path)
        lines = _take_weights(program, weights, path, program.load_state_dict)
        return WarmStart([f"started from the weights of {path} at step {step}", *lines])
    saved = checkpoint.open_checkpoint(path)
    wanted = program.config.init_optimizer and not weights_only
    if saved.several and wanted:
        raise UserError(
            f"init_from: {path} holds the states of {len(saved.several)} optimizers ({', '.join(saved.several)}), and "
            "a run has one: take its weights alone, init_optimizer=false"
        )
    held = state_dict.with_versions({**saved.weights, **saved.extra}, state_dict.versions(saved.weights))
    weights = saved.weights if loading.torch_module(program) is None else held
    lines = _take_weights(program, weights, path, functools.partial(loading.load, program))
    if saved.optimizer is None or not wanted:
        return WarmStart([f"started from the weights of {path}", *lines])
    if program.given is not None:
        raise UserError(
            f"init_from: {path} holds an optimizer's state, and the optimizer was given to Trainer as an object; load "
            "the state into it (optimizer.load_state_dict) and set init_optimizer=false"
        )
    return go_on(program, saved, lines)


def locate(path: str | pathlib.Path) -> pathlib.Path:
    """Return the file or folder that `init_from` names. Raises UserError if there is none."""
    path = pathlib.Path(path).expanduser()
    _refuse_checkpoint(path)
    if not path.exists():
        raise UserError(
            f"init_from: {path}: no such file or folder; wanted a .pt, a .safetensors or a folder with weights"
        )
    return path


def _of_run(program: Program, folder: pathlib.Path) -> tuple[dict[str, Any], int]:
    """Return weights and step of a run folder's best checkpoint, or of its newest if none was evaluated."""
    checkpoints = run_dir.open_checkpoints(folder)
    which = "best" if checkpoints.best() is not None else "last"
    settings = config_io.read(folder / "config.yaml")
    if settings.get("task") is not None:
        known = {program.config.task, *trust.named_code(program.config).values()}
        with trust.restricted(known, "Export its weights to a file, and start from that"):
            _, _, model, step = run_dir.load_model(folder, which)
        return state_dict.open_state_dict(model), step
    step = run_dir.pick(checkpoints, which)  # the model was given in Python: only the arrays' names are known
    loaded = checkpoints.restore_weights(step, jax.sharding.SingleDeviceSharding(jax.local_devices()[0]))
    section = config_io.validate(EvaluationConfig, settings.get("evaluation") or {}, folder / "config.yaml")
    params = (loaded.get("ema") if section.averaged else None) or loaded.get("params", {})
    model = dict(state_dict.named_variables(loading.shapes(program)))
    carried = {key for key in program.state.buffers if key not in model}
    buffers = {key: value for key, value in loaded.get("buffers", {}).items() if key not in carried}
    return {**params, **loaded.get("frozen", {}), **buffers}, step


def _refuse_checkpoint(path: pathlib.Path) -> None:
    """Raise UserError for a part of a run folder, such as a single checkpoint; only the whole folder can be loaded."""
    if (path / "meta.json").is_file() and (path / "state").is_dir():
        folder = path.parent.parent
    elif path.name == "checkpoints" and (path.parent / "config.yaml").is_file():
        folder = path.parent
    else:
        return
    raise UserError(
        f"init_from: {path} is a part of a jaxtrain run folder: give the folder, {folder}, whose best checkpoint is "
        "taken"
    )


def _take_weights(
    program: Program, weights: Mapping[str, Any], path: pathlib.Path, load: Callable[..., tuple[list[str], list[str]]]
) -> list[str]:
    model, strict = loading.shapes(program), program.config.init_strict
    weights = state_dict.without_wrappers(weights, dict(state_dict.named_variables(model)))
    prefix = _prefix(model, weights)
    if prefix and (not strict or all(key.startswith(prefix) for key in weights)):
        weights = state_dict.renamed(weights, lambda key: key.removeprefix(prefix))
        return [f"the file holds the model as `{prefix[:-1]}`", *_take_weights(program, weights, path, load)]
    part = _part_held(model, weights)
    if part is not None:
        weights = state_dict.renamed(weights, lambda key: f"{part}.{key}")
    elif not strict:
        weights, left = _fitting(model, weights)
    bad = state_dict.not_finite(model, weights)
    if bad:
        raise UserError(
            f"init_from: {path}: {len(bad)} tensors hold NaN or infinity ({', '.join(bad[:4])}); nothing can be "
            "trained from them. Take an earlier checkpoint"
        )
    missing, _ = load(weights, strict=strict and part is None, source=f"init_from: {path}")
    if part is not None:
        return [f"the file holds `{part}` alone; the rest of the model starts as it does without init_from"]
    if strict:
        return []
    return [
        f"{len(keys)} keys {what}: {', '.join(keys[:8])}"
        for what, keys in (("of the model kept", missing), ("of the file left", left))
        if keys
    ]


def _prefix(model, weights: Mapping[str, Any]) -> str:
    """Return the only prefix, such as Lightning's `model.`, under which the file holds every key of the model; "" if
    there is none or more than one, or if the keys are there without a prefix."""
    names = [key for key, _ in state_dict.named_variables(model) if not key.endswith(state_dict.COUNTER)]
    found = {key.removesuffix(names[0]) for key in weights if key.endswith(f".{names[0]}")}
    held = [prefix for prefix in found if all(prefix + name in weights for name in names)]
    return held[0] if len(held) == 1 and names[0] not in weights else ""


def _part_held(model, weights: Mapping[str, Any]) -> str | None:
    """Return the name of the only child module whose keys, without its prefix, are exactly the file's, such as an
    autoencoder without the model that it analyses. None if there is none, or more than one."""
    parts: dict[str, set[str]] = {}
    for key, _ in state_dict.named_variables(model):
        head, _, rest = key.partition(".")
        if rest:
            parts.setdefault(head, set()).add(rest)
    held = [head for head, keys in parts.items() if keys == set(weights)]
    return held[0] if len(held) == 1 else None


def _fitting(model, weights: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    wanted = {key: variable.shape for key, variable in state_dict.named_variables(model)}
    fits = lambda key, value: key.endswith(checkpoint.EXTRA_STATE) or tuple(value.shape) == wanted.get(key)
    fitting = {key: value for key, value in weights.items() if fits(key, value)}
    if not any(key in wanted for key in fitting):
        raise UserError("init_from: not one tensor of the file fits the model by name and shape")
    return state_dict.with_versions(fitting, state_dict.versions(weights)), [
        key for key in weights if key not in fitting
    ]


def go_on(program: Program, saved: checkpoint.TrainingCheckpoint, lines: Sequence[str] = ()) -> WarmStart:
    """Load moments, counters, averages and loss scale of a training checkpoint whose weights are already loaded.

    Raises UserError if they are of another optimizer, or nothing is left to train.
    """
    if groups.boundaries(program.config.optim):
        raise UserError(
            f"init_from: {saved.source} holds an optimizer's state, which knows nothing of groups that train in some "
            "epochs only (optim.groups); take its weights alone: init_optimizer=false"
        )
    if saved.optimizer is None:
        raise UserError(f"init_from: {saved.source} holds no optimizer's state; take its weights: init_optimizer=false")
    state, optim = program.state, program.config.optim
    model = program.model_def.merge(state.params, state.frozen, state.buffers)
    first = first_names(model)
    back = {first[key]: key for key in state.params}
    like = torch_checkpoint.renamed(state.opt_state, first)
    parameter_groups = torch_checkpoint.groups(optim, program.optimizer, model)
    order, source = parameter_order(model), f"init_from: {saved.source}"
    optimizer, assumed = bridge.with_names(optim.name, saved.optimizer, like, parameter_groups, order, source)
    opt_state, count, notes = bridge.from_torch(optim.name, optimizer, like, parameter_groups, order, source)
    scheduler = saved.scheduler or {}
    step, updates = _counters(saved, count, scheduler, program.steps_per_epoch)
    if step >= program.total_steps:
        raise UserError(
            f"init_from: {saved.source} stands at step {step} and this run ends at {program.total_steps}: nothing is "
            "left to do. Raise train.steps (or train.epochs) above it, or take its weights alone: init_optimizer=false"
        )
    changes: dict[str, Any] = {
        "opt_state": torch_checkpoint.renamed(opt_state, back),
        "step": place(np.asarray(step, np.int32), state.step),
        "updates": place(np.asarray(updates, np.int32), state.updates),
    }
    if state.scale and saved.scaler:
        changes["scale"] = bridge.from_scaler(saved.scaler, state.scale)
    if state.ema and saved.ema:
        sizes = {first[key]: tuple(old.shape) for key, old in state.ema.items()}
        found, told = averages(saved.ema, sizes, order, source)
        changes["ema"] = {key: place(found[first[key]], old) for key, old in state.ema.items()}
        assumed += told
    elif saved.ema:
        assumed.append("the file's averaged weights are left out: this run keeps none (optim.ema_decay)")
    carried = {key: _carried(saved.carried[key], old) for key, old in state.buffers.items() if key in saved.carried}
    if carried:
        changes["buffers"] = state.buffers | carried
    program.state = state.replace(**changes)
    done = f"went on from {saved.source} at step {step} of {program.total_steps}: weights, optimizer and schedule"
    plateau = bridge.from_plateau(scheduler, optimizer, parameter_groups, optim.lr, source)
    return WarmStart([done, *lines, *assumed, *notes], plateau)


def _counters(
    saved: checkpoint.TrainingCheckpoint, count: int | None, scheduler: Mapping[str, Any], steps_per_epoch: int
) -> tuple[int, int]:
    """Return the batches seen and the updates made. SGD does not count updates; then the file's step is used, or its
    epoch if it agrees with a scheduler stepped once per epoch. Raises UserError if the file has neither."""
    updates = saved.updates if saved.updates is not None else count
    if updates is None:
        updates = saved.step
    if updates is None and saved.epoch is not None and scheduler.get("last_epoch") in (saved.epoch, saved.epoch + 1):
        updates = int(scheduler["last_epoch"]) * steps_per_epoch
    if updates is None:
        told = ", ".join(
            f"{name} {value}"
            for name, value in (("epoch", saved.epoch), ("the scheduler's last_epoch", scheduler.get("last_epoch")))
            if value is not None
        )
        raise UserError(
            f"init_from: {saved.source}: does not tell how many steps were done: its optimizer counts none, and "
            f"{told or 'it holds no `step`'}{' may count epochs done, epochs begun or updates' if told else ''}. Save "
            "`step` (optimizer steps) in it, or take its weights alone: init_optimizer=false"
        )
    return (updates if saved.step is None else saved.step), updates


def _carried(value: Any, old: jax.Array) -> jax.Array:
    if not jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
        return place(value, old)
    return jax.random.wrap_key_data(jnp.asarray(np.asarray(value, np.uint32)), impl=jax.random.key_impl(old))
