"""Prepare a Trainer's first step: checked settings, loaders' workers, weights, the checkpoint to resume from."""

import dataclasses
import pathlib
import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import torch

from jaxtrain.compat.synced_objects import check_shard
from jaxtrain.errors import UserError
from jaxtrain.systems.fmri_autoencoder.config import Gen1Options, HeadOptions
from jaxtrain.systems.fmri_autoencoder.errors import OtherModel
from jaxtrain.systems.fmri_autoencoder.original.legacy_config import TrainingConfig, is_checkpoint_file
from jaxtrain.systems.fmri_autoencoder.torch_blocks import in_its_types
from jaxtrain.systems.fmri_autoencoder.torch_gen1 import SherlockAutoencoder
from jaxtrain.systems.fmri_autoencoder.torch_head import MultimodalAutoencoder
from torch_bridge.state_dict import convert_ddp_state

STOCK = (SherlockAutoencoder, MultimodalAutoencoder)
READ = ("loss", "compat", "seed", "shard")  # sections of overrides that the loop reads


def run_settings(config: TrainingConfig, model: torch.nn.Module, samples: int) -> Any:
    """Return the checked settings of a run. Raises UserError for overrides that only `jaxtrain run` follows."""
    from jaxtrain import config_io

    options = model.options if isinstance(model, STOCK) else Gen1Options()
    values = dataclasses.replace(config, num_epochs=max(1, config.num_epochs)).settings(
        options.model_dump(),
        isinstance(options, HeadOptions),
        samples,
        accelerator=jax.default_backend() != "cpu",  # autocast does nothing on a CPU either
    )
    settings = config_io.check(values, "TrainingConfig")[1]
    refused = set(config.overrides) - {*READ, "tracking"}
    refused |= {"tracking"} if any(value is True for value in config.overrides.get("tracking", {}).values()) else set()
    if refused:
        raise UserError(
            f"TrainingConfig.overrides: {', '.join(sorted(refused))}: the Trainer's loop reads the config's own fields "
            f"and {', '.join(READ)}; `python -m jaxtrain.run` reads the rest"
        )
    check_shard(settings.shard, "TrainingConfig.overrides: shard")
    return settings


def worker_count(dataset: Any, count: int, say: Callable[[str], None]) -> int:
    """Return a loader's number of worker processes: 0, with a message, if they could not import the dataset's class."""
    try:
        pickle.dumps(type(dataset))
    except (pickle.PicklingError, AttributeError) as error:
        if count:
            say(f"samples are read in this process, not by {count} workers: {error}. Define the class in a module")
        return 0
    return count


def is_on_meta(model: torch.nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def drawn_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return initial weights, from torch's generator, for a model on the meta device."""
    if not isinstance(model, STOCK):
        raise UserError(f"Trainer: a {type(model).__name__} on the meta device has no weights; give them with to_empty")
    with torch.device("cpu"):
        return type(model).of(model.options).state_dict()


def load_weights(model: torch.nn.Module, state: Mapping[str, Any], source: Any) -> None:
    """Load weights in place; a module on the meta device gets its memory now.

    Raises OtherModel if they do not fit.
    """
    state, meta = convert_ddp_state(dict(state)), is_on_meta(model)
    try:
        model.load_state_dict(in_its_types(model, state) if meta else state, strict=True, assign=meta)
    except RuntimeError as error:
        raise OtherModel(f"{source}: {error}") from None


def checkpoint_to_resume(resume_from: str | None) -> pathlib.Path | None:
    """Return the file of config.resume_from: a checkpoint, or the newest checkpoint_epoch_N.pt of a folder.

    Raises UserError for a folder without one.
    """
    if resume_from is None:
        return None
    path = pathlib.Path(resume_from).expanduser()
    if is_checkpoint_file(resume_from):
        return path
    epochs = {
        file: re.fullmatch(r"checkpoint_epoch_(\d+)\.pt", file.name) for file in path.glob("checkpoint_epoch_*.pt")
    }
    numbered = {file: int(match[1]) for file, match in epochs.items() if match}
    if not numbered:
        raise UserError(f"resume_from: {path} holds no checkpoint_epoch_N.pt; name a .pt file, or the folder of a run")
    return max(numbered, key=lambda file: numbered[file])
