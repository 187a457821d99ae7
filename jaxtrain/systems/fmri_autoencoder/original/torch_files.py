"""The original's checkpoint files, written during a run."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from jaxtrain.systems.fmri_autoencoder.original.legacy_config import of_config
from jaxtrain.systems.fmri_autoencoder.original.torch_schedule import scheduler_of
from torch_bridge import files


def write(config: Any, state: Mapping[str, Any], folder: pathlib.Path, known: Mapping[str, Any]) -> None:
    """Write those of checkpoint_epoch_N.pt (after N epochs), best_checkpoint.pt and final_checkpoint.pt that are due.

    state: the training state as `jaxtrain.export --optimizer` has it. known: see TorchTwin.checkpoint. `epoch` is the
    0-based epoch with which the original would continue.
    """
    losses = [entry["loss"] for entry in known["val_history"] if entry["loss"] == entry["loss"]]
    content = {
        "epoch": known["epoch"],
        "global_step": known["step"],
        "model_state_dict": state["model"],
        "optimizer_state_dict": _plain_groups(state["optimizer"]),
        "best_val_loss": min(losses, default=float("inf")),
        "config": dataclasses.asdict(of_config(config)),
        "train_history": [{"total_loss": entry["loss"], **entry} for entry in known["train_history"]],
        "val_history": [{"total_loss": entry["loss"], **entry} for entry in known["val_history"]],
    }
    scheduler = schedule_state(config, state, known)
    if scheduler is not None:
        content["scheduler_state_dict"] = scheduler
    if state.get("scaler"):
        content["scaler_state_dict"] = state["scaler"]
    if "loss" in known["metrics"]:
        content["val_loss"] = known["metrics"]["loss"]
    names = {
        f"checkpoint_epoch_{known['epoch']}.pt": known["due"] and known["step"] % known["steps_per_epoch"] == 0,
        "best_checkpoint.pt": known["best"],
        "final_checkpoint.pt": known["final"],
    }
    for name in (name for name, due in names.items() if due):
        files.save(content, folder / name, follow=False)


def schedule_state(config: Any, state: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the state_dict of the original's scheduler at this step; None for a constant rate."""
    if config.optim.schedule.name not in ("cosine", "step", "constant"):
        return dict(state["scheduler"])  # of a LambdaLR: the original has no such schedule
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.optim.lr)
    epochs = -(-(len(state["schedule"]) - 1) // known["steps_per_epoch"])
    scheduler = scheduler_of(config, optimizer, known["steps_per_epoch"], epochs)
    if scheduler is None:
        return None
    scheduler.go_to(int(np.asarray(state["updates"])))
    return scheduler.state_dict()


def _plain_groups(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the group entries that the AdamW of the original's torch version does not know."""
    groups = [
        {name: value for name, value in group.items() if name not in ("name", "param_names")}
        for group in optimizer["param_groups"]
    ]
    return {"state": optimizer["state"], "param_groups": groups}
