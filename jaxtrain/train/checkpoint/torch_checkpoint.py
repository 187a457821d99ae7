"""Convert a run's whole training state to one tree of torch state dicts, as `jaxtrain.export --optimizer` writes it.

model, optimizer, scheduler, scaler    state dicts that torch's own classes load
schedule       float64 [steps + 1], factor on the learning rate of every optimizer step
step, updates, epoch    batches seen, optimizer updates made, passes over the data
ema            averaged parameters, if the run keeps them
carried        state that only JAX has (layouts.Carry)
optimizer_class, config
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain import config_io
from jaxtrain.errors import UserError
from jaxtrain.optim import groups as groups_
from jaxtrain.optim import optimizer as optimizers
from jaxtrain.optim import schedules
from jaxtrain.runtime.precision import POLICIES
from jaxtrain.runtime.prng import initial_rngs
from jaxtrain.task import trains
from jaxtrain.train import run_dir
from jaxtrain.train.checkpoint import recorded_model
from jaxtrain.train.checkpoint.state_tree import enumerate_leaves
from jaxtrain.train.step.init_state import group_labels
from jaxtrain.train.step.state import ModelDef, initial_scale
from jaxtrain.train.step.step_guard import SCALE_GROWTH_STEPS
from torch_bridge import optimizer_state as bridge
from torch_bridge.layouts import abstract, first_names, named_variables, parameter_order
from torch_bridge.state_dict import leaf_of, open_state_dict

Tree = dict[str, Any]


def of_run(folder: str | pathlib.Path, which: str = "last") -> Tree:
    """Return the training state in a checkpoint of a run folder, on one device. Raises UserError as
    `run_dir.open_weights` does, and for a user's own optimizer and schedule and groups that train in some epochs."""
    task, config, checkpoints = run_dir.open_weights(folder)
    step = run_dir.pick(checkpoints, which)
    meta = checkpoints.meta(step)
    if meta.get("optimizer"):
        raise UserError(
            f"{checkpoints.folder}: this run was trained with {meta['optimizer']}, given to Trainer as an object; its "
            "own state_dict() has its state. Export the weights alone, without --optimizer"
        )
    if meta.get("own_schedule"):
        raise UserError(
            f"{checkpoints.folder}: the learning rates of this run come from a schedule that Trainer was given as an "
            "object, or from its task in Python, which no file has. Export the weights alone, without --optimizer"
        )
    total, per_epoch = meta["total_steps"], meta["steps_per_epoch"]
    config = config.model_copy(update={"train": config.train.model_copy(update={"steps": total})})
    precision = POLICIES[config.precision.policy]
    model = abstract(lambda: task.build_model(config, initial_rngs(config.seed)))
    recorded_model.check_exports(model)
    model_def = ModelDef.of(model, lambda key: trains(task, key, config))
    params, frozen, buffers = model_def.split(model)
    params = jax.eval_shape(precision.for_storage, params)
    if groups_.boundaries(config.optim):
        raise UserError(
            f"{checkpoints.folder}: groups of this run train in some epochs only (optim.groups), so their updates are "
            "counted apart, which this file has no place for. Export the weights alone, without --optimizer"
        )
    optimizer = optimizers.build(config.optim, params, group_labels(task, config, model))
    opt_state = jax.eval_shape(optimizer.init, params)
    counter = jax.ShapeDtypeStruct((), jnp.int32)
    parts = {"params": params, "frozen": frozen, "buffers": buffers, "step": counter, "updates": counter}
    parts |= {"opt_state": dict(enumerate_leaves(opt_state)), "scale": initial_scale(config.precision)}
    parts |= {"ema": params} if config.optim.ema_decay is not None else {}
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    arrays = checkpoints.restore_parts(step, parts, device)
    names = [name for name, _ in enumerate_leaves(opt_state)]
    arrays["opt_state"] = jax.tree.unflatten(
        jax.tree.structure(opt_state), [arrays.get("opt_state", {})[name] for name in names]
    )
    schedule = schedules.build(config.optim.schedule, config.optim.lr, total, per_epoch)
    if task.schedule is not None:
        schedule = task.schedule(config, schedule, per_epoch)
    evaluations = len(meta["val_history"])
    return tree(config, model_def, optimizer, arrays, schedule, per_epoch, meta["plateau"], evaluations)


def of_program(program: Any) -> Tree:
    """Return the training state of a live Program, whose arrays this process must hold in full."""
    state = {field.name: getattr(program.state, field.name) for field in dataclasses.fields(program.state)}
    steps = program.config.train.model_copy(update={"steps": program.total_steps})
    config = program.config.model_copy(update={"train": steps})
    return tree(config, program.model_def, program.optimizer, state, program.schedule, program.steps_per_epoch)


def tree(
    config: Any,
    model_def: ModelDef,
    optimizer: optimizers.Optimizer,
    state: Mapping[str, Any],
    schedule: Callable[[int], float],
    steps_per_epoch: int,
    plateau: Mapping[str, Any] | None = None,
    evaluations: int = 0,
) -> Tree:
    """Build the tree. state: the fields of a TrainState. config.train.steps holds the run's length."""
    params, frozen, buffers = (state.get(name, {}) for name in ("params", "frozen", "buffers"))
    model = model_def.merge(params, frozen, buffers)
    first = first_names(model)
    step, updates = int(state["step"]), int(state["updates"])
    scale = plateau["lr"] / config.optim.lr if plateau and config.optim.lr else 1.0
    parameter_groups = groups(config.optim, optimizer, model, schedule(updates) * scale)
    saved: Tree = {
        "model": open_state_dict(model),
        "optimizer": bridge.to_torch(config.optim.name, renamed(state["opt_state"], first), parameter_groups, updates),
        "scheduler": _scheduler(config.optim.schedule, parameter_groups, updates, plateau, evaluations),
        "schedule": np.array([schedule(i) for i in range(config.train.steps + 1)], np.float64),
        "step": step,
        "updates": updates,
        "epoch": step // steps_per_epoch,
        "optimizer_class": f"torch.optim.{bridge.TORCH_CLASSES[config.optim.name]}",
        "config": config_io.plain(config),
    }
    if state.get("scale"):
        saved["scaler"] = bridge.to_scaler(state["scale"], SCALE_GROWTH_STEPS)
    if state.get("ema"):
        saved["ema"] = {first[key]: leaf_of(value) for key, value in state["ema"].items()}
    exported = dict(named_variables(model))
    carried = {key: leaf_of(_numbers(value)) for key, value in buffers.items() if key not in exported}
    return saved | ({"carried": carried} if carried else {})


def groups(config: Any, optimizer: optimizers.Optimizer, model: nnx.Module, factor: float = 1.0) -> list[bridge.Group]:
    """Return a run's torch parameter groups: one per group of the task, and one more for its parameters without weight
    decay, each in torch's parameter order. factor: the current one on the learning rates."""
    first = first_names(model)
    key_of = {first[key]: key for key in optimizer.groups}
    rates = optimizers.rates(config, set(optimizer.groups.values()))
    members: dict[tuple[str, bool], list[str]] = {}
    for name in parameter_order(model):
        if name in key_of:
            key = key_of[name]
            members.setdefault((optimizer.groups[key], optimizer.decays[key]), []).append(name)
    found = []
    for (group, decays), names in members.items():
        options = bridge.group_options(
            config.name,
            lr=rates["lr"][group] * factor,
            initial_lr=rates["lr"][group],
            weight_decay=rates["weight_decay"][group] if decays else 0.0,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            momentum=config.momentum,
            nesterov=config.nesterov,
        )
        found.append(bridge.Group(group if decays else f"{group} without decay", options, names))
    return found


def renamed(opt_state: Any, names: Mapping[str, str]) -> Any:
    """Return the optimizer's state with the keys of its dicts renamed; keys not in `names` stay."""
    fields = getattr(opt_state, "_fields", ())
    dicts = {field: getattr(opt_state, field) for field in fields if isinstance(getattr(opt_state, field), dict)}
    changed = {field: {names.get(key, key): v for key, v in arrays.items()} for field, arrays in dicts.items()}
    return opt_state._replace(**changed) if changed else opt_state


def _scheduler(config: Any, parameter_groups, updates: int, plateau, evaluations: int) -> Tree:
    if plateau:
        options = {name: getattr(config, name) for name in ("factor", "patience", "mode", "threshold")}
        options |= {"min_lrs": [config.min_lr] * len(parameter_groups), "eps": 1e-8}
        return bridge.to_plateau(plateau, options, evaluations)
    base = [group.options["initial_lr"] for group in parameter_groups]
    return bridge.to_lambda_lr(base, [group.options["lr"] for group in parameter_groups], updates)


def _numbers(value: jax.Array) -> jax.Array:
    """Return a random key's data; any other array as it is."""
    return jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value
