"""Find weights, optimizer, schedule and position in a training loop's checkpoint, under the names such loops use."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxtrain.errors import UserError
from torch_bridge.lazy_array import LazyArray, is_leaf

WEIGHT_KEYS = ("model_state_dict", "state_dict", "model", "module", "net", "weights", "model_state")
OPTIMIZER_KEYS = ("optimizer_state_dict", "optimizer", "optimizer_states", "optim")
SCHEDULER_KEYS = ("scheduler_state_dict", "scheduler", "lr_scheduler", "lr_schedulers")
SCALER_KEYS = ("scaler_state_dict", "scaler")
STEP_KEYS = ("step", "global_step", "iteration", "steps")
EPOCH_KEYS = ("epoch", "epochs", "current_epoch")


@dataclasses.dataclass(frozen=True)
class TrainingCheckpoint:
    """A checkpoint with its arrays still in the file. `None` or empty for what it does not hold.

    step: batches seen; updates: optimizer updates made, where the file says so. epoch: as the loop counts them, done or
    begun.
    optimizer, scheduler, scaler: torch's state dicts. ema: averaged weights. carried: state that only JAX knows.
    """

    source: pathlib.Path
    weights: dict[str, LazyArray]
    optimizer: dict[str, Any] | None = None
    scheduler: dict[str, Any] | None = None
    scaler: dict[str, Any] | None = None
    ema: dict[str, LazyArray] = dataclasses.field(default_factory=dict)
    carried: dict[str, LazyArray] = dataclasses.field(default_factory=dict)
    step: int | None = None
    updates: int | None = None
    epoch: int | None = None


def open_checkpoint(path: str | pathlib.Path) -> TrainingCheckpoint:
    """The checkpoint in a file or Hugging Face folder. Raises UserError as `files.open_weights`."""
    from torch_bridge import files

    path = pathlib.Path(path)
    if path.is_dir():
        return _open_folder(path)
    value = files.read(path)
    state = weights(value, path)
    if _first(value, WEIGHT_KEYS) is None:
        return TrainingCheckpoint(path, state)
    optimizer = _first(value, OPTIMIZER_KEYS)
    if optimizer is not None and not {"state", "param_groups"} <= set(optimizer):
        held = sorted(map(str, optimizer))[:6]
        raise UserError(f"{path}: its optimizer state holds {held}, wanted state and param_groups")
    return TrainingCheckpoint(
        path,
        state,
        optimizer,
        _first(value, SCHEDULER_KEYS),
        _first(value, SCALER_KEYS),
        dict(_first(value, ("ema",)) or {}),
        dict(_first(value, ("carried",)) or {}),
        _number(value, STEP_KEYS),
        _number(value, ("updates",)),
        _number(value, EPOCH_KEYS),
    )


def _open_folder(folder: pathlib.Path) -> TrainingCheckpoint:
    """Weights, and what accelerate lays beside them: optimizer.bin, scheduler.bin; counters of trainer_state.json."""
    from torch_bridge import files

    weights = files.open_weights(folder)
    if not (folder / "optimizer.bin").is_file():
        return TrainingCheckpoint(folder, weights)
    parts = {name: files.read(folder / f"{name}.bin") for name in ("optimizer", "scheduler") if _held(folder, name)}
    state: dict[str, Any] = {}
    if (folder / "trainer_state.json").is_file():
        try:
            state = dict(json.loads((folder / "trainer_state.json").read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise UserError(f"{folder / 'trainer_state.json'}: not readable: {error}") from None
    step, epoch = _number(state, STEP_KEYS), _number(state, EPOCH_KEYS)
    return TrainingCheckpoint(folder, weights, **parts, step=step, updates=step, epoch=epoch)


def _held(folder: pathlib.Path, name: str) -> bool:
    return (folder / f"{name}.bin").is_file()


def _number(value: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """The first of `names` that holds a whole number: Python's, numpy's or a tensor of one."""
    for name in names:
        inner = value.get(name)
        if is_leaf(inner) and inner.shape in ((), (1,)):
            inner = np.asarray(inner).reshape(())[()]
        if isinstance(inner, (int, np.integer)) and not isinstance(inner, bool):
            return int(inner)
    return None


def weights(value: Any, path: pathlib.Path) -> dict[str, LazyArray]:
    """The state dict inside what a file holds: the value itself, or what it keeps under one of WEIGHT_KEYS."""
    while isinstance(value, Mapping) and (inner := _first(value, WEIGHT_KEYS)) is not None:
        value = inner
    if not isinstance(value, Mapping) or not any(is_leaf(inner) for inner in value.values()):
        held = f"a dict with {sorted(map(str, value))[:8]}" if isinstance(value, Mapping) else type(value).__name__
        raise UserError(f"{path}: holds {held}, wanted a state dict, or a dict with {' or '.join(WEIGHT_KEYS[:3])}")
    state = {str(key): inner for key, inner in value.items() if not str(key).endswith("_extra_state")}
    odd = [key for key, inner in state.items() if not is_leaf(inner)]
    if odd:
        raise UserError(f"{path}: {odd[0]} is {type(state[odd[0]]).__name__}, wanted a tensor ({len(odd)} such keys)")
    return state


def _first(value: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any] | None:
    """The first of `names` that holds a mapping (or a list of one, as Lightning writes)."""
    for name in names:
        inner = value.get(name)
        if isinstance(inner, (list, tuple)) and len(inner) == 1:
            inner = inner[0]
        if isinstance(inner, Mapping) and inner:
            return dict(inner)
    return None
