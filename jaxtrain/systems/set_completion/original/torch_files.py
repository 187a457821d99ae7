"""Write the original's files during a run: epoch checkpoints, the best model, its arguments, the metrics history."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.systems.set_completion.original.torch_compat import save_artifacts
from torch_bridge import files

METRICS = ("loss", "f1", "precision", "recall", "hamming")


def write(config: Any, state: Mapping[str, Any], folder: pathlib.Path, known: Mapping[str, Any]) -> None:
    """Write epoch_NNN.pth if due, the files of `save_artifacts` for the best weights, and metrics_history.json.

    epoch_NNN.pth holds model_state_dict, optimizer_state_dict, scheduler_state_dict, epoch, step and best_val_loss.
    state: the training state as `jaxtrain.export --optimizer` has it. known: see TorchTwin.checkpoint.
    """
    losses = [entry["loss"] for entry in known["val_history"] if entry["loss"] == entry["loss"]]
    if known["due"] or known["final"]:
        content = {
            "model_state_dict": state["model"],
            "optimizer_state_dict": state["optimizer"],
            "scheduler_state_dict": state["scheduler"],
            "epoch": known["epoch"],
            "step": known["step"],
            "best_val_loss": min(losses, default=float("inf")),
        }
        files.save(content, folder / f"epoch_{known['epoch']:03d}.pth", follow=False)
    if known["best"] or (known["final"] and not known["val_history"]):
        save_artifacts(config, state["model"], folder)
    history = {"train": _columns(known["train_history"]), "val": _columns(known["val_history"])}
    (folder / "metrics_history.json").write_text(json.dumps(history, indent=2))


def _columns(entries: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    return {name: [entry[name] for entry in entries] for name in METRICS if entries and name in entries[0]}
