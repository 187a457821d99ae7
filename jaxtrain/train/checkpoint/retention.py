"""List, rank and delete the checkpoints of a folder."""

import contextlib
import os
import pathlib
import re
import shutil
from collections.abc import Sequence

from jaxtrain.errors import UserError
from jaxtrain.runtime import plain_files
from jaxtrain.train.checkpoint import manifest

PART, DAMAGED = ".part", ".damaged"
COMMITTED = re.compile("0|[1-9][0-9]{0,17}")  # name of a committed checkpoint's folder: its step


def committed(folder: pathlib.Path) -> list[int]:
    """Return the steps of a folder's committed checkpoints, oldest first. Raises UserError if it cannot be read."""
    try:
        names = [entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be read: {error.strerror}; wanted the folder that holds the run's checkpoints"
        ) from None
    return sorted(int(name) for name in names if COMMITTED.fullmatch(name))


def run_of_newest(folder: pathlib.Path) -> str | None:
    """Return the run identity in a folder's newest checkpoint with a valid meta.json; None if there is none."""
    for step in reversed(committed(folder)):
        with contextlib.suppress(UserError):
            return manifest.read(folder / str(step)).get("run")
    return None


def ranked(folder: pathlib.Path, steps: Sequence[int], metric: str, mode: str) -> list[int]:
    """Return the steps that were evaluated for `metric`, the best first. mode: "min" or "max"."""
    sign = 1 if mode == "min" else -1
    scored = []
    for step in steps:
        with contextlib.suppress(UserError):  # damaged: no candidate
            scored.append((step, manifest.read(folder / str(step)).get("metrics", {}).get(metric)))
    return [step for _, step in sorted((sign * value, step) for step, value in scored if _is_number(value))]


def _is_number(value: float | None) -> bool:
    return value is not None and value == value


def remove(folder: pathlib.Path, name: str) -> None:
    """Delete a checkpoint. It is renamed first, so that it no longer counts if the deletion is interrupted."""
    aside = folder / f"{name.partition('.')[0]}{PART}"
    if name != aside.name:
        plain_files.delete(aside)
        (folder / name).rename(aside)
    shutil.rmtree(aside)
