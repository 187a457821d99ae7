"""Write and reopen a run folder: config, environment, summary, and the trained model."""

import importlib.metadata as metadata
import json
import pathlib
from collections.abc import Callable, Collection
from typing import Any

import jax
from flax import nnx

from jaxtrain import config_io, redaction, strict_json, trust
from jaxtrain.config import TrainingConfig
from jaxtrain.errors import UserError
from jaxtrain.runtime import git
from jaxtrain.runtime.prng import initial_rngs
from jaxtrain.task import Task, trains
from jaxtrain.train.checkpoint import recorded_model
from jaxtrain.train.checkpoint.checkpoints import Checkpoints
from jaxtrain.train.step.state import ModelDef
from torch_bridge.atomic_file import replacing
from torch_bridge.layouts import abstract


def same(one: str | pathlib.Path, other: str | pathlib.Path) -> bool:
    """Return True if two paths name one folder."""
    return pathlib.Path(one).expanduser().resolve() == pathlib.Path(other).expanduser().resolve()


def environment(devices: int) -> dict[str, Any]:
    """Return facts that a result depends on: devices, processes, versions, git revision."""
    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    return {
        "device": f"{devices} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
        "versions": {name: metadata.version(name) for name in names},
        "git": git.revision(),
    }


def write_start(folder: pathlib.Path, config: TrainingConfig, devices: int) -> None:
    """Write config.yaml and environment.json."""
    write(folder, "config.yaml", config_io.dump(config))
    write(folder, "environment.json", json.dumps(environment(devices), indent=1))


def is_described(folder: pathlib.Path) -> bool:
    """Return True if a folder has a config.yaml."""
    return (folder / "config.yaml").is_file()


def write_summary(folder: pathlib.Path, summary: dict[str, Any], devices: int) -> None:
    """Write summary.json of a finished run."""
    write(folder, "summary.json", strict_json.dumps(summary | environment(devices), indent=1))


def changes(folder: pathlib.Path, config: TrainingConfig) -> list[str]:
    """Return the settings that differ from those in the folder's config.yaml, as "key: old -> new"."""
    path = folder / "config.yaml"
    if not path.is_file():
        return []
    saved, now = (config_io.flatten(v) for v in (config_io.read(path), config_io.plain(config)))
    return [f"{k}: {saved.get(k)} -> {v}" for k, v in now.items() if k in saved and saved[k] != v]


def write(folder: pathlib.Path, name: str, text: str) -> None:
    """Write a file of the run folder atomically, with secrets masked. Raises UserError if it cannot be written."""
    path = folder / name
    try:
        with replacing(path) as aside:
            aside.write_text(redaction.mask(text), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"run.dir: cannot write {path}: {error.strerror}; make room, or choose another run.dir"
        ) from None


def made_in_python(folder: str | pathlib.Path) -> bool:
    """Return True if a run folder's model was passed to Trainer in Python, so that no command can build it again."""
    return _settings(pathlib.Path(folder)).get("task") is None


def open_run(folder: str | pathlib.Path) -> tuple[Task, Any, Checkpoints]:
    """Return task, config and checkpoints of a run folder. Raises UserError if it is none, or names no task."""
    folder = pathlib.Path(folder)
    if made_in_python(folder):
        raise UserError(
            f"{folder}: its model was made in Python, and no command can compute with it; in the script that made it "
            "`trainer.load_best()` brings the best weights back and `trainer.evaluate()` gives their metrics. "
            f"`jaxtrain export --run {folder} --output F.pt` writes them from the checkpoint"
        )
    task, config = config_io.load(folder / "config.yaml")
    return task, config, checkpoints(folder, config)


def open_weights(folder: str | pathlib.Path) -> tuple[Task, Any, Checkpoints]:
    """Return the same as `open_run`; for a model made in Python a Task that holds its arrays and computes nothing.

    Raises UserError also for a folder of an older version, which does not record the model's arrays.
    """
    folder = pathlib.Path(folder)
    if not made_in_python(folder):
        return open_run(folder)
    task = recorded_model.task_of(folder)
    if task is None:
        raise UserError(
            f"{folder}: its model was made in Python, and {recorded_model.FILE} is missing, which would name its "
            "arrays (older versions wrote none): run the script once more with this folder, then export; or call "
            "trainer.load_best() there and torch.save(model.state_dict(), 'F.pt')"
        )
    config = _core_config(folder, TrainingConfig.model_fields)
    trust.check(config, folder / "config.yaml")
    return task, config, checkpoints(folder, config)


def open_checkpoints(folder: str | pathlib.Path) -> Checkpoints:
    """Return the checkpoints of any run folder, even of one whose task is unknown."""
    folder = pathlib.Path(folder)
    return checkpoints(folder, _core_config(folder, ("checkpoint", "evaluation")))


def _core_config(folder: pathlib.Path, names: Collection[str]) -> TrainingConfig:
    """Return these settings and sections of a folder's config.yaml, without the keys that a task has added."""
    values, fields = _settings(folder), TrainingConfig.model_fields
    sections: dict[str, Any] = {}
    for name, value in values.items():
        if name not in names or name not in fields:
            continue
        known = getattr(fields[name].annotation, "model_fields", None)
        if known is None:
            sections[name] = value
        elif isinstance(value, dict):
            sections[name] = {key: inner for key, inner in value.items() if key in known}
    return config_io.validate(TrainingConfig, sections, folder / "config.yaml")


def _settings(folder: pathlib.Path) -> dict[str, Any]:
    if not (folder / "config.yaml").is_file():
        raise UserError(
            f"{folder}: no run folder, config.yaml is missing; wanted what jaxtrain.run wrote, as in runs/digits"
        )
    return config_io.read(folder / "config.yaml")


def checkpoints(folder: pathlib.Path, config: TrainingConfig, warn: Callable[[str], None] = print) -> Checkpoints:
    """Return the checkpoints of a run folder, kept by the config's rules. warn: called with a line about problems."""
    evaluation, keep = config.evaluation, config.checkpoint
    return Checkpoints(folder / "checkpoints", keep.keep_last, keep.keep_best, evaluation.metric, evaluation.mode, warn)


def pick(checkpoints: Checkpoints, which: str) -> int:
    """Return the step that "best", "last" or a number means. Raises UserError if it is missing or damaged."""
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
    if which in map(str, steps):
        return int(which)
    raise UserError(f"--checkpoint {which}: wanted best, last or one of {', '.join(map(str, steps))}")


def load_model(
    folder: str | pathlib.Path, which: str = "best", averaged: bool | None = None
) -> tuple[Task, Any, nnx.Module, int]:
    """Return task, config, model with a checkpoint's weights on one device, and the step. A model made in Python
    holds its arrays and cannot be called (`open_weights`).

    averaged: with optim.ema_decay, take the averaged instead of the trained weights; default: evaluation.averaged.
    """
    task, config, checkpoints = open_weights(folder)
    step = pick(checkpoints, which)
    model = abstract(lambda: task.build_model(config, initial_rngs(config.seed)))
    model_def = ModelDef.of(model, lambda key: trains(task, key, config))
    params, frozen, buffers = model_def.split(model)
    parts = {"params": params, "frozen": frozen, "buffers": buffers}
    if config.optim.ema_decay is not None:
        parts["params"], parts["ema"] = params, params
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    loaded = checkpoints.restore_parts(step, parts, device)
    averaged = config.evaluation.averaged if averaged is None else averaged
    weights = (loaded.get("ema") if averaged else None) or loaded["params"]
    return task, config, model_def.merge(weights, loaded.get("frozen", {}), loaded.get("buffers", {})), step
