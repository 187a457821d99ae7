"""The best checkpoint of a run: what it is, its weights in a program, its weights as a file for torch."""

import dataclasses
import importlib.util
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from jaxtrain.errors import UserError
from jaxtrain.runtime.launch import broadcast_from_process_zero
from jaxtrain.train import run_dir
from jaxtrain.train.checkpoint import loading
from jaxtrain.train.checkpoint.checkpoints import Checkpoints
from torch_bridge import files
from torch_bridge import state_dict as bridge

EXPORTS = "exports"  # folder of a run


@dataclasses.dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint in a run folder. step: optimizer steps made. metrics: of its evaluation on the validation set; empty
    without one. path: its folder."""

    step: int
    metrics: Mapping[str, float]
    path: pathlib.Path


def find(checkpoints: Checkpoints, which: str) -> SavedCheckpoint:
    """Return the checkpoint that "best", "last" or a step means. Raises UserError if it is missing or damaged, and for
    "best" if the best evaluation's checkpoint was not kept."""
    step = run_dir.pick(checkpoints, which)
    if which == "best":
        _check_is_best(checkpoints, step)
    return SavedCheckpoint(step, dict(checkpoints.meta(step)["metrics"]), checkpoints.folder / str(step))


def _check_is_best(checkpoints: Checkpoints, step: int) -> None:
    """Raise UserError if a better evaluation of the run has no checkpoint: it was deleted, or never saved."""
    newest = checkpoints.latest()
    record = checkpoints.meta(step if newest is None else newest).get("best_metrics") or {}
    best, metric = record.get("step"), checkpoints.metric
    if best is None or best == step or metric not in record or best in checkpoints.steps():
        return
    here = checkpoints.meta(step)["metrics"][metric]
    if (here > record[metric]) if checkpoints.mode == "min" else (here < record[metric]):
        raise UserError(
            f"{checkpoints.folder}: the best evaluation was step {best} ({metric} {record[metric]:.6g}), and its "
            f"checkpoint is not there: checkpoint.keep_best was 0, or it could not be saved. The best of those kept is "
            f"step {step} ({metric} {here:.6g}): take that one by its number"
        )


def load(program: Any, checkpoints: Checkpoints, which: str) -> SavedCheckpoint:
    """Load a checkpoint's weights and buffers into a program; steps and the optimizer's state stay. All processes call
    it. Raises UserError as `find` does."""
    step = broadcast_from_process_zero("checkpoint", lambda: find(checkpoints, which).step)
    loaded = checkpoints.restore(step, program.state, optimizer=False)
    weights = {name: getattr(loaded, name) for name in ("params", "frozen", "buffers", "ema")}
    program.state = program.state.replace(**weights)
    return SavedCheckpoint(step, dict(checkpoints.meta(step)["metrics"]), checkpoints.folder / str(step))


def export(program: Any, checkpoints: Checkpoints) -> pathlib.Path:
    """Write exports/best.pt (best.safetensors without torch) into the run folder; return its path.

    It holds the best checkpoint's weights, or the newest's if none was evaluated, as `state_dict` of a Trainer gives
    them. Raises UserError if it cannot be written.
    """
    step = run_dir.pick(checkpoints, "best" if checkpoints.best() is not None else "last")
    name = "best.pt" if importlib.util.find_spec("torch") is not None else "best.safetensors"
    weights = files.cast(_weights(program, checkpoints, step), program.config.checkpoint.save_precision)
    weights = loading.with_extra_states(program, weights)
    return files.save(weights, checkpoints.folder.parent / EXPORTS / name, follow=False)


def _weights(program: Any, checkpoints: Checkpoints, step: int) -> dict[str, Any]:
    state = program.state
    shapes = jax.eval_shape(
        lambda: {"params": state.params, "frozen": state.frozen, "buffers": state.buffers, "ema": state.ema}
    )
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    loaded = checkpoints.restore_parts(step, {kind: part for kind, part in shapes.items() if part}, device)
    averaged = loaded.get("ema") if program.config.evaluation.averaged else None
    params = averaged or loaded.get("params", {})
    model = program.model_def.merge(params, loaded.get("frozen", {}), loaded.get("buffers", {}))
    return bridge.open_state_dict(model)
