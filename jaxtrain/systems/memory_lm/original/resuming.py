"""Load the weights and the training state of a checkpoint folder into the Trainer's torch objects."""

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import torch

from jaxtrain.errors import UserError
from jaxtrain.systems.memory_lm.original import checkpoint_files
from jaxtrain.systems.memory_lm.original.torch_models import as_tensor
from torch_bridge.files import checkpoint


def open_checkpoint(path: pathlib.Path, resumes: bool) -> checkpoint.TrainingCheckpoint:
    """Open a checkpoint-STEP folder, or the newest one of an output_dir. resumes: False for any file of weights too.

    Raises UserError if there is none.
    """
    folders = checkpoint_files.by_step(path) if path.is_dir() else []
    source = folders[-1] if folders else path
    if not source.exists() or resumes and not (source / "trainer_state.json").is_file():
        name, kinds = ("resume_from", "") if resumes else ("init_from", ", a .pt, a .safetensors")
        raise UserError(
            f"training.{name}_checkpoint: {path}: wanted a checkpoint-STEP folder, or an output_dir with one{kinds}"
        )
    return checkpoint.open_checkpoint(source)


def load_weights(model: torch.nn.Module, saved: checkpoint.TrainingCheckpoint) -> None:
    """Load the weights in place. Raises UserError for those of another model."""
    weights = {key: as_tensor(value) for key, value in saved.weights.items()}
    tensors = model.state_dict(keep_vars=True)
    present = {id(tensors[key]) for key in weights if key in tensors}
    tied = {key for key, x in tensors.items() if id(x) in present}  # model.safetensors has one name for both
    try:
        result = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        raise UserError(f"{saved.source}: {error}") from None
    missing = [key for key in result.missing_keys if key not in tied]
    if missing or result.unexpected_keys:
        raise UserError(
            f"{saved.source}: {len(missing)} keys missing ({', '.join(missing[:4])}), {len(result.unexpected_keys)} "
            f"unexpected ({', '.join(result.unexpected_keys[:4])}): are these the weights of another model?"
        )


def load_moments(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Load an optimizer.bin. Raises UserError if it holds other parameters."""
    state = {number: {k: as_tensor(v) for k, v in entry.items()} for number, entry in saved["state"].items()}
    try:
        optimizer.load_state_dict({"state": state, "param_groups": [dict(group) for group in saved["param_groups"]]})
    except ValueError as error:
        raise UserError(f"optimizer.bin: {error}: the run trains other parameters") from None


def counters(folder: pathlib.Path) -> dict[str, Any]:
    """Return the Trainer attributes that a checkpoint folder stores in trainer_state.json."""
    saved = json.loads((folder / "trainer_state.json").read_text())
    best = saved.get("best_loss")
    names = ("global_step", "epoch", "patience_counter")
    return {name: int(saved.get(name, 0)) for name in names} | {"best_loss": math.inf if best is None else best}
