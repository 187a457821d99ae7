"""Choose the folder of a run: never one that holds another run."""

import dataclasses
import pathlib
from collections.abc import Callable

from jaxtrain import config_io
from jaxtrain.config import TrainingConfig
from jaxtrain.errors import UserError
from jaxtrain.train.checkpoint import manifest
from jaxtrain.train.checkpoint.mirror import Mirror
from jaxtrain.train.resume import fingerprint
from jaxtrain.train.resume.fingerprint import DECIDING, FILE, Fingerprint

NAMED = {"code": "the code", "data": "the data", "loss": "the loss", "optimizer": "the optimizer that was given"}
LOST = "fingerprint"  # stands for differences that are unknown, because the fingerprint is missing
SHOWN = 3  # most differences in a sentence


@dataclasses.dataclass(frozen=True)
class Choice:
    """The folder of a run, and warnings about it."""

    folder: pathlib.Path
    warnings: list[str]


def choose(
    folder: pathlib.Path, config: TrainingConfig, now: Fingerprint, total_steps: int, resume: str, forced: bool
) -> Choice:
    """Return the run's folder. If none was named (runs/run) and that holds another run, try runs/run_2, runs/run_3, ...

    forced: the user wants this folder, whatever it holds.

    Raises UserError if a named folder holds another run.
    """
    if forced:
        return Choice(folder, [])
    named = config.run.dir is not None or config.run.name is not None
    first, number, why = folder, 1, ""
    while True:
        used = _is_used(folder, named)
        saved, told = fingerprint.read_or_own(folder, now) if used else (None, [])
        lost = fingerprint.lost_identity(folder) if used else None
        if (saved is None and lost is None) or (resume == "never" and named):
            break
        other = now.differences(saved, DECIDING) if saved else []
        soft = now.differences(saved, ("weights", *_comparable_code(now, saved))) if saved else []
        if not other and _is_complete(folder, config, total_steps):
            other = soft
        if not other and lost not in (None, now.identity):
            other = [LOST]
        if not other and resume != "never":
            lines = (
                [f"{folder}: {_sentence(soft, folder, config)}; going on from its checkpoint all the same"]
                if soft
                else []
            )
            return Choice(folder, told + lines + ([f"{first} {why}: this run is in {folder}"] if why else []))
        if named:
            raise UserError(
                f"{folder}: holds another run: {_sentence(other, folder, config)}. Choose another run.dir or run.name; "
                f"or go on in it all the same with resume={str(folder)!r} (--resume {folder})"
            )
        why = why or f"holds another run ({_sentence(other, folder, config) or 'resume=never'})"
        number += 1
        folder = first.with_name(f"{first.name}_{number}")
    return Choice(folder, [f"{first} {why}: this run is in {folder}"] if why else [])


def check_mirror(
    mirror: Mirror, folder: pathlib.Path, config: TrainingConfig, now: Fingerprint, total_steps: int
) -> None:
    """Raise UserError if a mirror holds another run than the folder does or, if that is empty, than this one."""
    text, steps = mirror.fingerprint(), mirror.steps()
    if text is None:
        if steps:
            raise UserError(f"checkpoint.mirror: {mirror.place}: holds checkpoints, but no {FILE} that says whose")
        return
    saved = fingerprint.parse(text, f"{mirror.place}/{FILE}")
    here = manifest.run_of(folder) if _is_used(folder, named=True) else None
    if here == saved.identity:
        return
    if here is not None:
        found = "its checkpoints are not of the run in this folder"
    else:
        other = now.differences(saved, DECIDING)
        if not other and steps and _has_ended(steps[-1], lambda: mirror.meta(steps[-1]), config, total_steps):
            other = now.differences(saved, ("weights", *_comparable_code(now, saved)))
        found = _sentence(other, mirror.run_folder or folder, config)
    if found:
        raise UserError(
            f"checkpoint.mirror: {mirror.place}: holds another run: {found}. Give each run a mirror of its own, or "
            "empty that one"
        )


def _comparable_code(now: Fingerprint, saved: Fingerprint) -> tuple[str, ...]:
    """Return ("code",) if both were made by the same Python version; else (), as bytecode then differs anyway."""
    versions = {told.partition(":")[0] for f in (now, saved) for [told] in f.parts.get("code", {}).values()}
    return ("code",) if len(versions) <= 1 else ()


def _is_used(folder: pathlib.Path, named: bool) -> bool:
    """Return True if a run has saved something there; if folders are numbered, if one trains there now."""
    checkpoints = folder / "checkpoints"
    saved = checkpoints.is_dir() and any(path.name.split(".")[0].isdigit() for path in checkpoints.iterdir())
    lock = folder / "run.lock"
    return saved or (not named and lock.is_file() and lock.stat().st_size > 0)


def _is_complete(folder: pathlib.Path, config: TrainingConfig, total_steps: int) -> bool:
    """Return True if nothing is left to train: the newest checkpoint is the last step's, or stopped early."""
    steps = [int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdigit()]
    if not steps:
        return False
    newest = max(steps)
    return _has_ended(newest, lambda: manifest.read(folder / "checkpoints" / str(newest)), config, total_steps)


def _has_ended(newest: int, read_meta: Callable[[], dict], config: TrainingConfig, total_steps: int) -> bool:
    if newest >= total_steps:
        return True
    try:
        meta = read_meta()
    except UserError:
        return False  # damaged: the run resumes from an earlier checkpoint
    patience = config.evaluation.patience
    return patience is not None and meta.get("best", {}).get("bad", 0) >= patience


def _sentence(differences: list[str], folder: pathlib.Path, config: TrainingConfig) -> str:
    """Describe the first few differences."""
    before = config_io.flatten(config_io.read(folder / "config.yaml")) if (folder / "config.yaml").is_file() else {}
    now = config_io.flatten(config.model_dump(mode="json"))
    words = []
    for difference in differences:
        if difference == LOST:
            words.append(f"its {FILE} is missing, and its checkpoints were begun with other settings, weights or data")
            continue
        part, _, key = difference.partition(".")
        if part == "settings":
            known = key in before and before[key] != now.get(key)
            words.append(f"{key} was {before[key]} and is {now.get(key)}" if known else f"{key} has changed")
        elif part == "model":
            words.append(f"the model differs in {key}")
        else:
            words.append(
                f"{NAMED[part]} differs ({key})" if part != "weights" else "the model begins from other weights"
            )
    words = list(dict.fromkeys(words))
    return ", ".join(words[:SHOWN]) + (f" and {len(words) - SHOWN} more" if len(words) > SHOWN else "")
