"""The original's checkpoint files, written during a run: checkpoint_epoch_*.pth, checkpoint_latest and _best."""

import functools
import pathlib
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from jaxtrain.systems.hjepa.original.torch_checkpoint import CheckpointManager
from jaxtrain.systems.hjepa.pretraining import momentum
from jaxtrain.systems.hjepa.torch_twin import HJEPA
from torch_bridge.datasets import to_torch


def write(config: Any, tree: Mapping[str, Any], run: pathlib.Path, meta: Mapping[str, Any]) -> None:
    """Write the files if a checkpoint is due, the best so far, or the last; keep the best checkpoint.keep_best.

    tree: the training state. meta: see TorchTwin.checkpoint.
    """
    if not (meta["due"] or meta["best"] or meta["final"]):
        return
    epoch = max(0, meta["epoch"] - 1)
    manager = _manager(run, config.checkpoint.keep_best)
    if meta["final"] and manager.written == epoch:
        return
    metrics = {"epoch": float(epoch)}
    if "loss" in meta["metrics"]:
        metrics["val_loss"] = float(meta["metrics"]["loss"])
        manager.update_best_metric(metrics["val_loss"])
    optimizer = original_optimizer(tree["optimizer"], parameter_names(config))
    updates = int(tree["updates"])
    rates = {"lr": optimizer["param_groups"][0]["lr"], "ema_momentum": float(momentum(config, updates))}
    scaler = tree.get("scaler")
    manager.save_checkpoint(
        epoch,
        {key: np.asarray(value) for key, value in tree["model"].items()},
        _holding(optimizer),
        rates,
        None if scaler is None else _holding(scaler),
        metrics,
        meta["best"],
        {"global_step": updates},
    )
    manager.written = epoch


@functools.lru_cache(maxsize=8)
def _manager(run: pathlib.Path, keep_best: int) -> CheckpointManager:
    """Return the run's CheckpointManager; its list of best files lives as long as the process."""
    manager = CheckpointManager(run, keep_best)
    manager.written = None  # epoch of the newest file
    return manager


def _holding(state: Mapping[str, Any]) -> Any:
    return types.SimpleNamespace(state_dict=lambda: dict(state))


def parameter_names(config: Any) -> list[str]:
    """Return the names of all parameters of the torch model in torch's order, frozen ones too, tied ones once."""
    with torch.device("meta"):
        return [name for name, _ in HJEPA(config).named_parameters()]


def original_optimizer(saved: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Return the optimizer state as the original has it: one group of all parameters, no state without a gradient."""
    number = {name: i for i, name in enumerate(names)}
    state = {}
    for group in saved["param_groups"]:
        for i, name in zip(group["params"], group["param_names"], strict=True):
            if i in saved["state"]:
                entry = saved["state"][i]
                state[number[name]] = {key: to_torch(np.asarray(value)) for key, value in entry.items()}
    options = {key: v for key, v in saved["param_groups"][0].items() if key not in ("params", "param_names", "name")}
    return {"state": dict(sorted(state.items())), "param_groups": [options | {"params": list(range(len(names)))}]}
