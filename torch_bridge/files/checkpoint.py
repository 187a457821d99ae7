"""Find weights, optimizer, schedule and position in a training loop's checkpoint, under the names that loops use."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxtrain.errors import UserError
from torch_bridge.lazy_array import LazyArray, is_leaf
from torch_bridge.state_dict import versions, with_versions

WEIGHT_KEYS = ("model_state_dict", "state_dict", "model", "module", "net", "weights", "model_state")
OPTIMIZER_KEYS = ("optimizer_state_dict", "optimizer", "optimizer_states", "optim")
EMA_KEYS = ("ema", "ema_state_dict", "state_dict_ema", "model_ema", "ema_model", "ema_model_state_dict")
SCHEDULER_KEYS = ("scheduler_state_dict", "scheduler", "lr_scheduler", "lr_schedulers")
SCALER_KEYS = ("scaler_state_dict", "scaler")
STEP_KEYS = ("step", "global_step", "iteration", "steps")
EXTRA_STATE = "_extra_state"  # how the keys of get_extra_state's values end
EPOCH_KEYS = ("epoch", "epochs", "current_epoch")


@dataclasses.dataclass(frozen=True)
class TrainingCheckpoint:
    """A checkpoint whose arrays are still in the file. Fields are None or empty for what the file does not hold.

    step: batches seen. updates: optimizer updates made, if the file has their number. epoch: as the loop counts them,
    finished or started.
    optimizer, scheduler, scaler: torch's state dicts. ema: averaged weights, in the form in which they were saved.
    carried: state that only JAX uses. extra: extra states of modules (get_extra_state). several: places of the states
    of several optimizers, in which case `optimizer` is None.
    """

    source: pathlib.Path
    weights: dict[str, LazyArray]
    optimizer: dict[str, Any] | None = None
    scheduler: dict[str, Any] | None = None
    scaler: dict[str, Any] | None = None
    ema: dict[str, Any] = dataclasses.field(default_factory=dict)
    carried: dict[str, LazyArray] = dataclasses.field(default_factory=dict)
    step: int | None = None
    updates: int | None = None
    epoch: int | None = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    several: tuple[str, ...] = ()


def open_checkpoint(path: str | pathlib.Path) -> TrainingCheckpoint:
    """Open the checkpoint in a file or Hugging Face folder. Raises UserError as `files.open_weights`."""
    from torch_bridge import files

    path = pathlib.Path(path)
    if path.is_dir():
        return _open_folder(path)
    value = files.read(path)
    state = weights(value, path)
    if _first(value, WEIGHT_KEYS) is None:
        return TrainingCheckpoint(path, state, extra=_extra(value))
    optimizer = _first(value, OPTIMIZER_KEYS)
    if optimizer is not None and not _is_optimizer(optimizer):
        held = sorted(map(str, optimizer))[:6]
        raise UserError(f"{path}: its optimizer state holds {held}, wanted state and param_groups")
    optimizers = _optimizers(value)
    return TrainingCheckpoint(
        path,
        state,
        next(iter(optimizers.values())) if len(optimizers) == 1 else None,
        _first(value, SCHEDULER_KEYS),
        _first(value, SCALER_KEYS),
        dict(_first(value, EMA_KEYS) or {}),
        dict(_first(value, ("carried",)) or {}),
        _number(value, STEP_KEYS),
        _number(value, ("updates",)),
        _number(value, EPOCH_KEYS),
        _extra(value),
        tuple(optimizers) if len(optimizers) > 1 else (),
    )


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, Mapping) and {"state", "param_groups"} <= set(value)


def _optimizers(value: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return every optimizer state in a checkpoint by its place, whatever its name: "opt", "optimizer_states[1]"."""
    found = {}
    for name, inner in value.items():
        items = (
            {f"{name}[{i}]": item for i, item in enumerate(inner)}
            if isinstance(inner, (list, tuple))
            else {name: inner}
        )
        found |= {place: dict(item) for place, item in items.items() if _is_optimizer(item)}
    return found


def _open_folder(folder: pathlib.Path) -> TrainingCheckpoint:
    """Open weights with accelerate's optimizer.bin and scheduler.bin, and the counters of trainer_state.json."""
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
    """Return the first entry of `names` that holds a whole number: Python's, numpy's or a tensor with one element."""
    for name in names:
        inner = value.get(name)
        if is_leaf(inner) and inner.shape in ((), (1,)):
            inner = np.asarray(inner).reshape(())[()]
        if isinstance(inner, (int, np.integer)) and not isinstance(inner, bool):
            return int(inner)
    return None


def weights(value: Any, path: pathlib.Path) -> dict[str, LazyArray]:
    """Return the state dict in a file's content: the value itself, or its entry under one of WEIGHT_KEYS."""
    value = inside(value)
    if not isinstance(value, Mapping) or not any(is_leaf(inner) for inner in value.values()):
        held = f"a dict with {sorted(map(str, value))[:8]}" if isinstance(value, Mapping) else type(value).__name__
        raise UserError(f"{path}: holds {held}, wanted a state dict, or a dict with {' or '.join(WEIGHT_KEYS[:3])}")
    state = {str(key): inner for key, inner in value.items() if not str(key).endswith(EXTRA_STATE)}
    odd = [key for key, inner in state.items() if not is_leaf(inner)]
    if odd:
        raise UserError(f"{path}: {odd[0]} is {type(state[odd[0]]).__name__}, wanted a tensor ({len(odd)} such keys)")
    return with_versions(state, versions(value))


def _extra(value: Any) -> dict[str, Any]:
    """Return the extra states of modules (get_extra_state), by key."""
    return {str(key): inner for key, inner in inside(value).items() if str(key).endswith(EXTRA_STATE)}


def inside(value: Any) -> Any:
    """Return a file content's entry under one of WEIGHT_KEYS, or the value itself."""
    while isinstance(value, Mapping) and (inner := _first(value, WEIGHT_KEYS)) is not None:
        value = inner
    return value


def _first(value: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any] | None:
    """Return the first entry of `names` that holds a mapping (or a list of one, as Lightning writes)."""
    for name in names:
        inner = value.get(name)
        if isinstance(inner, (list, tuple)) and len(inner) == 1:
            inner = inner[0]
        if isinstance(inner, Mapping) and inner:
            return with_versions(inner, versions(inner))
    return None
