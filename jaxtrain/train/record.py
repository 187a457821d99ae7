"""The small files of a run folder: what was asked for, where it ran, what came out."""

import importlib.metadata as metadata
import json
import pathlib
import subprocess
from typing import Any

import jax

from jaxtrain import config_io
from jaxtrain.config import TrainingConfig
from jaxtrain.errors import UserError


def folder_of(config: TrainingConfig) -> pathlib.Path:
    """The run folder: run.dir, or runs/<run.name>."""
    return pathlib.Path(config.run.dir or pathlib.Path("runs") / (config.run.name or "run"))


def environment(devices: int) -> dict[str, Any]:
    """What a result depends on: the devices of its mesh, versions, git revision."""
    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "device": f"{devices} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
        "versions": {name: metadata.version(name) for name in names},
        "git": git.stdout.strip() or None,
    }


def write_start(folder: pathlib.Path, config: TrainingConfig, devices: int) -> None:
    """config.yaml and environment.json."""
    write(folder, "config.yaml", config_io.dump(config))
    write(folder, "environment.json", json.dumps(environment(devices), indent=1))


def write_summary(folder: pathlib.Path, summary: dict[str, Any], devices: int) -> None:
    """summary.json of a run that ended."""
    write(folder, "summary.json", json.dumps(summary | environment(devices), indent=1))


def changes(folder: pathlib.Path, config: TrainingConfig) -> list[str]:
    """Settings that differ from those the folder's run was started with."""
    path = folder / "config.yaml"
    if not path.is_file():
        return []
    saved, now = (config_io.flatten(v) for v in (config_io.read(path), config.model_dump(mode="json")))
    return [f"{k}: {saved.get(k)} -> {v}" for k, v in now.items() if k in saved and saved[k] != v]


def write(folder: pathlib.Path, name: str, text: str) -> None:
    """A file of the run folder, whole or not at all. Raises UserError where it cannot be written."""
    path = folder / name
    try:
        path.with_suffix(".part").write_text(text)
        path.with_suffix(".part").rename(path)
    except OSError as error:
        raise UserError(
            f"run.dir: cannot write {path}: {error.strerror}; make room, or choose another run.dir"
        ) from None
