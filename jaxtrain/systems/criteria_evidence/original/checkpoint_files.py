"""Write the original's checkpoint files during a run: checkpoints/latest_checkpoint.pt and best_checkpoint.pt."""

import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np


def write(config: Any, tree: Mapping[str, Any], run: pathlib.Path, meta: Mapping[str, Any]) -> None:
    """Write latest_checkpoint.pt, and copy it to best_checkpoint.pt if this evaluation is the best so far.

    tree: the training state. meta: see TorchTwin.checkpoint. The keys are the original Trainer's; `metrics` has its
    val_ names; the state of a disabled scaler is empty.
    """
    from torch_bridge import files

    metric = config.evaluation.metric
    best = meta["best_metrics"].get(metric)
    state = {
        "epoch": max(0, meta["epoch"] - 1),  # 0-based, as in the original
        "global_step": int(np.asarray(tree["updates"])),
        "model_state_dict": tree["model"],
        "optimizer_state_dict": tree["optimizer"],
        "metrics": {f"val_{name}": float(value) for name, value in meta["metrics"].items()},
        "best_metric_value": None if best is None else float(best),
        "scheduler_state_dict": tree["scheduler"],
        "scaler_state_dict": tree.get("scaler", {}),
    }
    latest = run / "checkpoints" / "latest_checkpoint.pt"
    files.save(state, latest)
    if meta["best"] and not meta["final"]:
        shutil.copy(latest, latest.with_name("best_checkpoint.pt"))
