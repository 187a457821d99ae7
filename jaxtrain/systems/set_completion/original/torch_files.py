"""The original's files, of a run: epochs, the best model, its arguments and the history of its metrics."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.systems.set_completion.original.torch_compat import save_artifacts
from torch_bridge import files

METRICS = ("loss", "f1", "precision", "recall", "hamming")


def write(config: Any, state: Mapping[str, Any], folder: pathlib.Path, known: Mapping[str, Any]) -> None:
    """Write what is due: epoch_NNN.pth (model_state_dict, optimizer_state_dict, epoch, best_val_loss, scheduler, step),
    and, of the best weights so far, what `save_artifacts` writes. metrics_history.json follows the run.

    state: the training state as `jaxtrain.export --optimizer` has it. known: see TorchTwin.checkpoint.
    """
    losses = [entry["loss"] for entry in known["val_history"] if entry["loss"] == entry["loss"]]
    if known["due"] or known["final"]:
        found = {
            "model_state_dict": state["model"],
            "optimizer_state_dict": state["optimizer"],
            "scheduler_state_dict": state["scheduler"],
            "epoch": known["epoch"],
            "step": known["step"],
            "best_val_loss": min(losses, default=float("inf")),
        }
        files.save(found, folder / f"epoch_{known['epoch']:03d}.pth", follow=False)
    if known["best"] or (known["final"] and not known["val_history"]):
        save_artifacts(config, state["model"], folder)
    history = {"train": _columns(known["train_history"]), "val": _columns(known["val_history"])}
    (folder / "metrics_history.json").write_text(json.dumps(history, indent=2))


def _columns(entries: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    return {name: [entry[name] for entry in entries] for name in METRICS if entries and name in entries[0]}
