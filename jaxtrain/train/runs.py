"""Opening a finished or running run's folder again."""

import pathlib
from typing import Any

import jax
from flax import nnx

from jaxtrain import config_io
from jaxtrain.config import TrainingConfig
from jaxtrain.errors import UserError
from jaxtrain.runtime.random import initial_rngs
from jaxtrain.task import Task
from jaxtrain.train.checkpoint import Checkpoints
from jaxtrain.train.state import Skeleton
from torch_bridge.layouts import abstract


def open_run(folder: str | pathlib.Path) -> tuple[Task, Any, Checkpoints]:
    """Task, config and checkpoints of a run folder. Raises UserError where it is none."""
    folder = pathlib.Path(folder)
    if _settings(folder).get("task") is None:
        raise UserError(
            f"{folder}: its model was handed over in Python, no command can build it again; in that script "
            "`trainer.evaluate()` gives the metrics and `torch_bridge.files.save(trainer.state_dict(), 'F.pt')` exports"
        )
    task, config = config_io.load(folder / "config.yaml")
    return task, config, _checkpoints(folder, config)


def open_checkpoints(folder: str | pathlib.Path) -> Checkpoints:
    """Those of any run folder, whose task need not be known."""
    folder = pathlib.Path(folder)
    values = _settings(folder)
    if values.get("task") is None:
        return _checkpoints(folder, config_io.validate(TrainingConfig, values, folder / "config.yaml"))
    return open_run(folder)[2]


def _settings(folder: pathlib.Path) -> dict[str, Any]:
    if not (folder / "config.yaml").is_file():
        raise UserError(
            f"{folder}: no run folder, config.yaml is missing; wanted what jaxtrain.run wrote, as in runs/digits"
        )
    return config_io.read(folder / "config.yaml")


def _checkpoints(folder: pathlib.Path, config: TrainingConfig) -> Checkpoints:
    evaluation, keep = config.evaluation, config.checkpoint
    return Checkpoints(folder / "checkpoints", keep.keep_last, keep.keep_best, evaluation.metric, evaluation.mode)


def pick(checkpoints: Checkpoints, which: str) -> int:
    """The step that "best", "last" or a number means. Raises UserError where that checkpoint is damaged."""
    step = _meant(checkpoints, which)
    found = checkpoints.problems(step)
    if found:
        whole = [str(other) for other in checkpoints.steps() if other != step and not checkpoints.problems(other)]
        raise UserError(
            f"{checkpoints.folder / str(step)}: the checkpoint is damaged ({found[0]}); take --checkpoint "
            f"{' or '.join(whole) or 'from a copy: no other is whole'}"
        )
    return step


def _meant(checkpoints: Checkpoints, which: str) -> int:
    steps = checkpoints.steps()
    if not steps:
        raise UserError(f"{checkpoints.folder}: holds no checkpoint yet")
    if which == "last":
        return steps[-1]
    if which == "best":
        best = checkpoints.best()
        if best is None:
            raise UserError(
                f"{checkpoints.folder}: no checkpoint was evaluated for {checkpoints.metric}, so there is no best one; "
                f"take --checkpoint last or one of {steps}"
            )
        return best
    if which.isdigit() and int(which) in steps:
        return int(which)
    raise UserError(f"--checkpoint {which}: wanted best, last or one of {', '.join(map(str, steps))}")


def load_model(
    folder: str | pathlib.Path, which: str = "best", averaged: bool | None = None
) -> tuple[Task, Any, nnx.Module, int]:
    """The model of a run with the weights of a checkpoint, on one device.

    averaged: with optim.ema_decay, take the average rather than the weights that train; evaluation.averaged if None.
    """
    task, config, checkpoints = open_run(folder)
    step = pick(checkpoints, which)
    model = abstract(lambda: task.build_model(config, initial_rngs(config.seed)))
    skeleton = Skeleton.of(model, lambda key: task.trainable(key, config))
    params, frozen, buffers = skeleton.split(model)
    parts = {"params": params, "frozen": frozen, "buffers": buffers}
    if config.optim.ema_decay is not None:
        parts["params"], parts["ema"] = params, params
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    loaded = checkpoints.restore_parts(step, parts, device)
    averaged = config.evaluation.averaged if averaged is None else averaged
    weights = (loaded.get("ema") if averaged else None) or loaded["params"]
    return task, config, skeleton.merge(weights, loaded.get("frozen", {}), loaded.get("buffers", {})), step
